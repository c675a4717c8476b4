"""One browser for the tests of all pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.serving.browser import Tab, chromium


@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab
