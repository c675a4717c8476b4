"""`test_driver_cases.py` needs our CUDA driver: `test_own_driver.py` runs it in such a process."""

from __future__ import annotations

import os

collect_ignore = (
    [] if os.environ.get("DEPLOYKIT_TEST_CUDA") == "driver" else ["test_driver_cases.py"]
)
