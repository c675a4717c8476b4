"""One set of the zoo's files for the whole session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.zoo.keeper import Keeper


@pytest.fixture(scope="session")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Keeper:
    from tests.support.zoo.keeper import Keeper

    return Keeper(tmp_path_factory.mktemp("zoo"))
