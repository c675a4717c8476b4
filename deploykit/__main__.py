"""The start of `deploykit`, `python -m deploykit` and `torchrun -m deploykit`.

From here on Ctrl-C exits with 130: what comes next imports for tenths of a second, and Python would
print a traceback of that.
"""

from __future__ import annotations

import os
import signal


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as by `nohup`
        signal.signal(signal.SIGINT, _exit_interrupted)
    from deploykit.cli.main import script

    script()


def _exit_interrupted(*_: object) -> None:
    """Nothing is begun yet, and a native module that is loading could lose an exception."""
    os.write(2, b"interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
