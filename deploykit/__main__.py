"""Start `deploykit`, `python -m deploykit` or `torchrun -m deploykit`.

From here on Ctrl-C exits with 130: the imports that follow take tenths of a second, and Python
would print a traceback if they were interrupted.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    import signal  # late: until this call the current folder is on `python -m`'s path

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as by `nohup`
        signal.signal(signal.SIGINT, _exit_interrupted)
    from deploykit.cli.main import main as run

    run()


def _exit_interrupted(*_: object) -> None:
    """Exit without an exception, which a native module that is loading could lose."""
    os.write(2, b"interrupted\n")
    os._exit(130)


def _leave_current_folder() -> None:
    """Remove the folder that `python -m` put on the path: a `json.py` there would be imported.

    The folder stays if this package itself was imported from it.
    """
    first = sys.path[0]
    own = os.path.join(first, "deploykit", "__main__.py") == __file__
    if not own and os.path.exists(first) and os.path.samefile(first, os.curdir):
        del sys.path[0]


if __name__ == "__main__":
    _leave_current_folder()
    main()
