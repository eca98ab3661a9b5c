"""The entry point of `ddplaunch` and `python -m ddplaunch`."""

from __future__ import annotations

import gc
import signal

# until the agent takes signals over, Ctrl-C ends us as it ends any program: with no traceback from an import;
# where the caller has it ignored (a background job of a script), it stays so
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
gc.disable()  # nothing that is imported is garbage, and looking for it takes a tenth of the start

import os  # noqa: E402 - the handler comes first
import sys  # noqa: E402
from typing import NoReturn  # noqa: E402

from ddplaunch.cli import main as cli  # noqa: E402


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
