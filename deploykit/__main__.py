"""The start of `deploykit`, `python -m deploykit` and `torchrun -m deploykit`.

From here on Ctrl-C exits with 130: what comes next imports for tenths of a second, and Python would
print a traceback of that.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    import signal  # here, as `python -m` has the current folder on the path until this is called

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as by `nohup`
        signal.signal(signal.SIGINT, _exit_interrupted)
    from deploykit.cli.main import script

    script()


def _exit_interrupted(*_: object) -> None:
    """Nothing is begun yet, and a native module that is loading could lose an exception."""
    os.write(2, b"interrupted\n")
    os._exit(130)


def _leave_current_folder() -> None:
    """Take off the path what `python -m` put there: a `json.py` next to a model would be imported.

    The folder stays if this package itself was imported from it.
    """
    first = sys.path[0]
    own = os.path.join(first, "deploykit", "__main__.py") == __file__
    if not own and os.path.exists(first) and os.path.samefile(first, os.curdir):
        del sys.path[0]


if __name__ == "__main__":
    _leave_current_folder()
    main()
