"""Hosts torch's store at MASTER_ADDR:MASTER_PORT, in a process of its own, until the agent has ended or ends it.

    PYTHON store_server.py PID_OF_THE_AGENT

It is no child of the worker that wants it, which need not outlive the others. Where a worker has been faster, that one hosts.
"""

import os
import select
import signal
import sys


def main() -> None:
    """Host it."""
    if os.fork():
        return
    del sys.path[0]  # our folder
    os.setsid()  # a signal to the group of the worker that started it is for the worker
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(address, port, None, True, wait_for_workers=False, multi_tenant=True)
    except RuntimeError:
        return
    if hasattr(os, "pidfd_open"):
        select.select([os.pidfd_open(int(sys.argv[1]))], [], [])
    else:  # Python 3.8
        signal.pause()
    del store


if __name__ == "__main__":
    main()
