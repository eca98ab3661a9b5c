"""The entry point of `ddplaunch` and `python -m ddplaunch`."""

from __future__ import annotations

from typing import NoReturn

import ddplaunch.interrupt  # noqa: F401 - before all else

# isort: split

import gc

gc.disable()  # nothing that is imported is garbage, and looking for it takes a tenth of the start

import os  # noqa: E402 - the handler comes first
import sys  # noqa: E402

from ddplaunch.errors import LaunchError, own_imports, write_stderr  # noqa: E402

try:
    with own_imports():
        from ddplaunch.cli import main as cli
except LaunchError as error:
    write_stderr(error.render())
    sys.exit(error.status)


def main() -> NoReturn:
    """Run the command and exit at once: an interpreter's shutdown takes longer than starting workers, and would save nothing."""
    status = cli.main()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            pass  # closed by the other side; the status is what counts
    os._exit(status)


if __name__ == "__main__":
    main()
