"""The entry point of `ddplaunch` and `python -m ddplaunch`."""

from __future__ import annotations

import ddplaunch.system.interrupt  # noqa: F401 - before all else

# isort: split

import gc

gc.disable()  # nothing that is imported is garbage, and looking for it takes a tenth of the start

import os  # noqa: E402 - the handler comes first
import sys  # noqa: E402
from typing import NoReturn  # noqa: E402

# msgspec would import it, and needs nothing of it since Python 3.11: 4 ms, and 0.5 MB in each process
sys.modules["typing_extensions"] = None  # type: ignore[assignment]

from ddplaunch.system.errors import LaunchError, own_imports, write_stderr  # noqa: E402

try:
    with own_imports():
        from ddplaunch.cli import main as cli
except LaunchError as error:
    write_stderr(error.render())
    sys.exit(error.status)
del sys.modules["typing_extensions"]


def main() -> NoReturn:
    """Run the command and exit at once: an interpreter's shutdown takes longer than starting workers, and would save nothing."""
    cli.watch_disk(sys.argv[1:], os.environ)  # all but `run` go on in a child, so that we can end while a disk hangs
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
