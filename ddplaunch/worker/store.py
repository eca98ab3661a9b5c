"""Has torch's store at MASTER_ADDR:MASTER_PORT hosted for clients that the program makes itself. Imports no torch.

torchrun's agent hosts that store before any worker runs, and some programs only connect to it. Here init_process_group() has
rank 0 host it. For a client that the program makes before, the store is hosted

- by rank 0 in its own process, where init_process_group() finds it,
- for another worker of node 0, by a process of its own: this file, run as `PYTHON store.py PID_OF_THE_AGENT`,
- for a worker of another node, by one of these; if none comes, its agent has node 0's agent start the process.

A client of torch that is refused tries again after 250 to 750 ms. So a worker of node 0 that is faster than rank 0 waits here
until the store is hosted.
"""

import os
import select
import signal
import subprocess
import sys

# bound here, and from `_socket`: a program may replace time and sockets (freezegun, pytest-socket, gevent)
from _socket import SOCK_STREAM, getaddrinfo, socket
from time import sleep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

WAIT = 2.0  # seconds that workers of node 0, which need time to import torch, have to host it by themselves
PATIENCE = 5.0  # seconds to wait here for rank 0; after that torch waits in its own way
_SHORTEST, _LONGEST = 0.001, 0.05  # seconds from one try to the next
_PART = 10  # a client waits here for at most this part of its timeout
# the parameters of TCPStore(), by position
PARAMETERS = (
    *("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers", "multi_tenant"),
    *("master_listen_fd", "use_libuv"),
)


def host_for_clients(distributed: "Any", server: str, ask: "Callable[[], None]") -> None:
    """Make TCPStore() host the store before a client connects; `server` is this file's path, `ask` asks the agent to host."""
    store = getattr(distributed, "TCPStore", None)
    if store is None:  # a torch that was built without torch.distributed
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # read now: a program may remove the variables before it makes a client
    one_node = os.environ["GROUP_WORLD_SIZE"] == "1"
    on_node_0, is_rank_0 = os.environ["GROUP_RANK"] == "0", os.environ["RANK"] == "0"
    agent = os.getppid()
    construct: Any = store.__init__
    kept = []

    def host() -> None:
        """Have a process of this job host the store, if no process does: this worker, a process of its own, or node 0's agent."""
        if is_hosted_within(0, address, port):
            return
        if is_rank_0:
            kept.append(store(address, port, None, True, wait_for_workers=False, multi_tenant=True))
        elif on_node_0:
            nothing = subprocess.DEVNULL
            subprocess.run(
                [sys.executable, server, str(agent)], stdin=nothing, stdout=nothing, stderr=nothing, check=False
            )
        elif not is_hosted_within(WAIT, address, port):
            ask()

    def __init__(self: "Any", *args: "Any", **keywords: "Any") -> None:  # noqa: N807 - it becomes that method
        """Make a store as torch does; if it is a client of MASTER_PORT that the program makes, have that store hosted first."""
        given = {**dict(zip(PARAMETERS, args)), **keywords}  # noqa: B905 - `strict` is new in 3.10
        if given.get("port") != port or not (one_node or given.get("host_name") == address):
            construct(self, *args, **keywords)
            return
        of_torch = given.get("multi_tenant")  # only init_process_group() makes stores with several tenants
        if not given.get("is_master"):
            if not of_torch:
                host()
            elif on_node_0 and given.get("host_name") == address:
                given = wait_for_rank_0(given)
        try:
            construct(self, **given)
        except RuntimeError as error:
            taken = "address already in use" in str(error).lower()
            if not (taken and given.get("is_master") and of_torch):
                raise
            # another worker wanted the store earlier, and has it hosted
            construct(self, **{**given, "is_master": False})

    store.__init__ = __init__


def wait_for_rank_0(given: "dict[str, Any]") -> "dict[str, Any]":
    """Wait for a part of this client's timeout until the store is hosted; return its parameters with the rest of the timeout."""
    timeout: Any = given.get("timeout")
    began = _now()
    if not hasattr(timeout, "total_seconds"):
        is_hosted_within(PATIENCE, given["host_name"], given["port"])
        return given
    is_hosted_within(min(PATIENCE, timeout.total_seconds() / _PART), given["host_name"], given["port"])
    waited = type(timeout)(seconds=_now() - began)
    return {**given, "timeout": max(timeout - waited, timeout / _PART)}  # a slow resolver may have used it up


def is_hosted_within(seconds: float, address: str, port: int) -> bool:
    """Wait at most `seconds` until a process listens at this address; return whether a process does."""
    until = _now() + seconds
    try:
        found = getaddrinfo(address, port, type=SOCK_STREAM)  # once: a resolver may be slow
    except OSError:
        return False
    pause = _SHORTEST
    while not any(_accepts(family, where) for family, *_, where in found):
        if _now() >= until:
            return False
        sleep(pause)
        pause = min(1.5 * pause, _LONGEST)
    return True


def _accepts(family: int, where: "Any") -> bool:
    """Return whether a process accepts connections at this address."""
    try:
        client = socket(family, SOCK_STREAM)
    except OSError:  # IPv6 is switched off, or there are too many open files
        return False
    try:
        client.settimeout(1)
        client.connect(where)
    except OSError:
        return False
    finally:
        client.close()
    return True


def _now() -> float:
    """Return seconds, to 10 ms, of a clock that no library for tests replaces; time.monotonic() may stand still."""
    return os.times().elapsed


def main() -> None:
    """Host the store until the agent has ended or ends this process; exit if another process hosts the store already.

    Forked, and in a session of its own: the worker that started it may end before the others, or get a signal.
    """
    if os.fork():
        return
    del sys.path[0]  # our folder
    os.setsid()
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
