"""One set of the zoo's files for the whole session, or for all of `make test` (DK_ZOO)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.zoo.keeper import Keeper


@pytest.fixture(scope="session")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Keeper:
    from tests.support.zoo.keeper import Keeper

    shared = os.environ.get("DK_ZOO")
    return Keeper(Path(shared) if shared else tmp_path_factory.mktemp("zoo"))
