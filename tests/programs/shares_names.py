"""Each rank shares memory by a name of its own, NAME-RANK, is ready, and ignores the signals that are to end it.

The first generation fails once the sign `fail` is up, or is ended from outside; a later one removes its name and ends well.
"""

import os
import signal
import sys
from multiprocessing import Process, get_context, shared_memory

from signs import RANK, all_ready, wait, wait_for_ever


def main(name, *ways):
    block = shared_memory.SharedMemory(f"{name}-{RANK}", create=True, size=4096)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        block.unlink()
        return
    if "children" in ways:  # each holds the pipe of the resource tracker open
        get_context("spawn").Process(target=wait_for_ever, daemon=True).start()
        Process(target=wait_for_ever, daemon=True).start()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    all_ready()
    if "fails" in ways and RANK == 1:
        wait("fail")
        sys.exit("the cause")
    wait_for_ever()


if __name__ == "__main__":
    main(*sys.argv[1:])
