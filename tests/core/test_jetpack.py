from __future__ import annotations

import pytest

from deploykit.core.jetpack import JETPACKS, find_jetpack, jetpack_of, release_numbers


@pytest.mark.parametrize(
    ("l4t", "version", "tensorrt"),
    [
        ("35.6.3", "5.1.5", "8.5.2"),
        ("36.3.0", "6.0", "8.6.2"),
        ("36.4.3", "6.2", "10.3.0"),
        ("36.4.7", "6.2.1", "10.3.0"),
        ("36.4", "6.1", "10.3.0"),
        ("36.10.0", "6.2.2", "10.3.0"),  # newer than the table; 10 is not before 4
        ("38.2.2", "7.0", "10.13.3"),
        ("39.2.0", "7.2", "10.16.2"),
    ],
)
def test_an_l4t_release_is_found_or_the_last_before_it(
    l4t: str, version: str, tensorrt: str
) -> None:
    found = find_jetpack(l4t)
    assert found is not None
    assert (found.version, found.tensorrt) == (version, tensorrt)
    assert jetpack_of(version) == found


@pytest.mark.parametrize("l4t", [None, "", "R36", "32.7.1", "37.1", "40.0", "35.1.0", "36.", "-1"])
def test_an_unknown_release_is_no_jetpack(l4t: str | None) -> None:
    assert find_jetpack(l4t) is None


def test_the_table_is_in_the_order_of_releases() -> None:
    assert sorted(JETPACKS, key=lambda row: release_numbers(row.l4t)) == list(JETPACKS)
    assert sorted(JETPACKS, key=lambda row: release_numbers(row.version)) == list(JETPACKS)
