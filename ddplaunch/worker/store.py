"""Has torch's store at MASTER_ADDR:MASTER_PORT served for clients that the program itself makes. Imports no torch.

torchrun's agent hosts that store before any worker runs, and some programs only connect to it. Here init_process_group() has
rank 0 host it. A client that is made in another way is served by what hosts it already, else rank 0 hosts it in its own
process, where init_process_group() finds it, and another worker of node 0 starts `store_server.py`. A worker of another node
waits for one of these, and after a while asks its agent to have node 0's agent start it.

A client of torch that is refused tries again after 250 to 750 ms. So a worker of node 0 that is faster than rank 0 waits here
until it would be served.
"""

import os
import subprocess
import sys

# bound here, and without what socket adds: a program may have its own time and sockets (freezegun, pytest-socket, gevent)
from _socket import SOCK_STREAM, getaddrinfo, socket
from time import sleep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

WAIT = 2.0  # seconds that workers of node 0, which need time to import torch, have to host it by themselves
PATIENCE = 5.0  # seconds; who has waited so long for rank 0 can as well wait as torch does
_SHORTEST, _LONGEST = 0.001, 0.05  # seconds from one try to the next
_PART = 10  # of the timeout of a client, at most one such part
# of TCPStore(), by position
PARAMETERS = (
    *("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers", "multi_tenant"),
    *("master_listen_fd", "use_libuv"),
)


def serve(distributed: "Any", server: str, ask: "Callable[[], None]") -> None:
    """Have it served; `distributed` is torch.distributed, `server` the path of store_server.py, `ask` asks the agent."""
    store = getattr(distributed, "TCPStore", None)
    if store is None:  # a torch that was built without torch.distributed
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # now: a program may remove them before it makes a client
    one_node = os.environ["GROUP_WORLD_SIZE"] == "1"
    on_node_0, is_rank_0 = os.environ["GROUP_RANK"] == "0", os.environ["RANK"] == "0"
    agent = os.getppid()
    construct: Any = store.__init__
    kept = []

    def host() -> None:
        if is_served(address, port):
            return
        if is_rank_0:
            kept.append(store(address, port, None, True, wait_for_workers=False, multi_tenant=True))
        elif on_node_0:
            nothing = subprocess.DEVNULL
            subprocess.run(
                [sys.executable, server, str(agent)], stdin=nothing, stdout=nothing, stderr=nothing, check=False
            )
        elif not is_served_within(WAIT, address, port):
            ask()

    def __init__(self: "Any", *args: "Any", **keywords: "Any") -> None:  # noqa: N807 - it becomes that method
        asked = {**dict(zip(PARAMETERS, args)), **keywords}  # noqa: B905 - `strict` is new in 3.10
        if asked.get("port") != port or not (one_node or asked.get("host_name") == address):
            construct(self, *args, **keywords)
            return
        # init_process_group() alone makes them with several tenants
        if not asked.get("is_master"):
            if not asked.get("multi_tenant"):
                host()
            elif on_node_0 and asked.get("host_name") == address:
                asked = wait_for_rank_0(asked)
        try:
            construct(self, **asked)
        except RuntimeError as error:
            taken = "address already in use" in str(error).lower()
            if not (taken and asked.get("is_master") and asked.get("multi_tenant")):
                raise
            construct(self, **{**asked, "is_master": False})  # another worker wanted it earlier and has it hosted

    store.__init__ = __init__


def wait_for_rank_0(asked: "dict[str, Any]") -> "dict[str, Any]":
    """Wait until this client would be served, for a part of its timeout; give what is asked then, with the rest of that."""
    timeout: Any = asked.get("timeout")
    began = _now()
    if not hasattr(timeout, "total_seconds"):
        is_served_within(PATIENCE, asked["host_name"], asked["port"])
        return asked
    is_served_within(min(PATIENCE, timeout.total_seconds() / _PART), asked["host_name"], asked["port"])
    waited = type(timeout)(seconds=_now() - began)
    return {**asked, "timeout": max(timeout - waited, timeout / _PART)}  # a slow resolver may have used it up


def is_served(address: str, port: int) -> bool:
    """Say whether a process listens there."""
    return is_served_within(0, address, port)


def is_served_within(seconds: float, address: str, port: int) -> bool:
    """Wait until a process listens there, so long at most; say whether one does."""
    until = _now() + seconds
    try:
        found = getaddrinfo(address, port, type=SOCK_STREAM)  # once: a resolver may be slow
    except OSError:
        return False
    pause = _SHORTEST
    while not any(_accepts(family, place) for family, *_, place in found):
        if _now() >= until:
            return False
        sleep(pause)
        pause = min(1.5 * pause, _LONGEST)
    return True


def _accepts(family: int, place: "Any") -> bool:
    try:
        client = socket(family, SOCK_STREAM)
    except OSError:  # IPv6 is switched off, or there are too many open files
        return False
    try:
        client.settimeout(1)
        client.connect(place)
    except OSError:
        return False
    finally:
        client.close()
    return True


def _now() -> float:
    """Seconds, to 10 ms, of a clock that no library for tests replaces; time.monotonic() may stand still."""
    return os.times().elapsed
