"""Benchmarks import each other by bare names, as scripts in one folder do."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "serve"
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]
