"""One set of the zoo's files for the whole session, or for all of `make test` (DK_ZOO)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.support.zoo.keeper import Keeper  # it needs torch

    return Keeper(Path(os.environ.get("DK_ZOO") or tmp_path_factory.mktemp("zoo")))
