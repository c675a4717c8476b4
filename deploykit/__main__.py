"""`python -m deploykit`: the command line, also where `torchrun -m deploykit` starts."""

from __future__ import annotations

from deploykit.cli.main import script

if __name__ == "__main__":
    script()
