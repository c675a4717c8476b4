"""What a target or a TensorRT cannot give is refused before anything is parsed."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploykit.building.tensorrt.build import build, check
from deploykit.building.tensorrt.options import HARDWARE
from deploykit.core.errors import BadInput, Unsupported
from tests.support.builders.tensorrt_fixtures import (  # noqa: F401
    Use,
    cache_fixture,
    model_fixture,
    options,
    out_fixture,
    use_fixture,
)


@pytest.mark.parametrize("level", HARDWARE)
def test_a_hardware_compatibility_level_reaches_the_builder(
    use: Use, model: Path, out: Path, level: str
) -> None:
    does = use(hardware="NONE AMPERE_PLUS SAME_COMPUTE_CAPABILITY")
    facts = build(model, out, options(hardware_compatible=level))
    config = does.seen["config"]
    assert config.hardware_compatibility_level == level.upper().replace("-", "_")
    assert facts.built_on["hardware_compatible"] == level


def test_a_level_that_this_tensorrt_has_not_is_refused_by_name(
    use: Use, model: Path, out: Path
) -> None:
    use(version="10.3.0", hardware="NONE AMPERE_PLUS")
    with pytest.raises(Unsupported, match=r"needs a newer TensorRT.*SAME_COMPUTE_CAPABILITY"):
        build(model, out, options(hardware_compatible="same-compute-capability"))
    assert not out.exists()


def test_ampere_and_later_is_not_built_for_what_came_before(use: Use, model: Path) -> None:
    use()
    with pytest.raises(Unsupported, match=r"profile t4 has compute capability 7\.5, 8\.0") as e:
        check(model, options("t4", hardware_compatible="ampere-plus"))
    assert "same-compute-capability" in (e.value.hint or "")


def test_a_level_that_is_none_is_bad_input(use: Use, model: Path) -> None:
    use()
    with pytest.raises(
        BadInput, match="`hardware_compatible`: unknown level 'everything"
    ) as caught:
        check(model, options(hardware_compatible="everything"))
    assert "ampere-plus" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("profile", "core", "says"),
    [
        ("l4", 0, "profile l4 has no DLA"),
        ("jetson-orin-nano-8gb", 0, "has no DLA"),
        ("jetson-orin-nx-8gb", 1, "has 1 DLA core, counted from 0"),
        ("jetson-agx-orin-64gb", 2, "has 2 DLA cores, counted from 0"),
        ("jetson-agx-orin-64gb", -1, "has 2 DLA cores"),
    ],
)
def test_a_dla_core_that_the_target_has_not_is_refused_in_a_check_too(
    use: Use, model: Path, profile: str, core: int, says: str
) -> None:
    use(dla_cores=8)
    with pytest.raises(Unsupported, match=says):
        check(model, options(profile, dla=core))
