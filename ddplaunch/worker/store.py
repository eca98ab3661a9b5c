"""Has torch's store at MASTER_ADDR:MASTER_PORT hosted for clients (TCPStore()) that the worker's program makes itself.

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

# seconds that workers of node 0, which need time to import torch, have to host the store by themselves
NODE_0_HOSTS_WITHIN = 2.0
RANK_0_TIMEOUT = 5.0  # seconds that a client waits here for rank 0; after that torch waits in its own way
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds from one try to the next
# the parameters of TCPStore(), by position
PARAMETERS = (
    *("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers", "multi_tenant"),
    *("master_listen_fd", "use_libuv"),
)


def host_for_clients(distributed: "Any", program: str, ask_agent: "Callable[[], None]") -> None:
    """Make TCPStore() host the store before a client connects.

    `program` is the path of this file; `ask_agent` has the agent of node 0 start it.
    """
    store_class = getattr(distributed, "TCPStore", None)
    if store_class is None:  # a torch that was built without torch.distributed
        return
    # read now: a program may remove the variables before it makes a client
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_only_node = os.environ["GROUP_WORLD_SIZE"] == "1"
    is_on_node_0, is_rank_0 = os.environ["GROUP_RANK"] == "0", os.environ["RANK"] == "0"
    agent_pid = os.getppid()
    construct: Any = store_class.__init__
    hosted = []  # keeps the store of rank 0 alive

    def host() -> None:
        """Have a process host the store, if none does yet: rank 0 itself, else `program`, started by this worker or an agent."""
        if is_hosted_within(0, address, port):
            return
        if is_rank_0:
            hosted.append(store_class(address, port, None, True, wait_for_workers=False, multi_tenant=True))
        elif is_on_node_0:
            nothing = subprocess.DEVNULL
            subprocess.run(
                [sys.executable, program, str(agent_pid)], stdin=nothing, stdout=nothing, stderr=nothing, check=False
            )
        elif not is_hosted_within(NODE_0_HOSTS_WITHIN, address, port):  # no worker of node 0 needs it
            ask_agent()

    def __init__(self: "Any", *args: "Any", **keywords: "Any") -> None:  # noqa: N807 - it becomes that method
        """Make a store as torch does; if it is a client of MASTER_PORT that the program makes, have that store hosted first."""
        parameters = {**dict(zip(PARAMETERS, args)), **keywords}  # noqa: B905 - `strict` is new in 3.10
        is_at_address = parameters.get("host_name") == address
        if parameters.get("port") != port or not (is_only_node or is_at_address):  # a store of the program's own
            construct(self, *args, **keywords)
            return
        is_server = parameters.get("is_master")
        is_of_torch = parameters.get("multi_tenant")  # init_process_group() alone makes stores with several tenants
        if not is_server and not is_of_torch:  # a client that the program makes itself
            host()
        elif not is_server and is_on_node_0 and is_at_address:
            # torch would try again only 250 to 750 ms later; the timeout becomes what is left of it
            parameters = wait_for_rank_0(parameters)
        try:
            construct(self, **parameters)
        except RuntimeError as error:
            is_hosted = "address already in use" in str(error).lower()
            if not (is_hosted and is_server and is_of_torch):
                raise
            # the client of another worker came before this rank 0, and had the store hosted: connect to that
            construct(self, **{**parameters, "is_master": False})

    store_class.__init__ = __init__


def wait_for_rank_0(parameters: "dict[str, Any]") -> "dict[str, Any]":
    """Wait until the store is hosted, for a part of a client's timeout; return its parameters with the rest of the timeout."""
    timeout: Any = parameters.get("timeout")
    began = _now()
    if not hasattr(timeout, "total_seconds"):  # none, or no timedelta: torch says what is wrong
        is_hosted_within(RANK_0_TIMEOUT, parameters["host_name"], parameters["port"])  # else torch goes on to wait
        return parameters
    part = timeout / 10  # for which it waits here at most, and which it leaves to torch at least
    is_hosted_within(min(RANK_0_TIMEOUT, part.total_seconds()), parameters["host_name"], parameters["port"])
    waited = type(timeout)(seconds=_now() - began)
    return {**parameters, "timeout": max(timeout - waited, part)}  # a slow resolver may have used all of it up


def is_hosted_within(seconds: float, address: str, port: int) -> bool:
    """Wait at most `seconds` until a process listens at this address; return whether a process does."""
    until = _now() + seconds
    try:
        found = getaddrinfo(address, port, type=SOCK_STREAM)  # once: a resolver may be slow
    except OSError:
        return False
    pause = _FIRST_PAUSE
    while not any(_accepts(family, where) for family, *_, where in found):
        if _now() >= until:
            return False
        sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
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

    The program of `PYTHON store.py PID_OF_THE_AGENT`. A child hosts, in a session of its own: the worker that started it may
    end before the others, or get a signal.
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
    if hasattr(os, "pidfd_open"):  # which becomes readable at the end of the agent
        select.select([os.pidfd_open(int(sys.argv[1]))], [], [])
    else:  # Python 3.8: till the agent ends this process
        signal.pause()
    del store  # torch stops hosting


if __name__ == "__main__":
    main()
