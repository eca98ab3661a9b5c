"""Has torch's store at MASTER_ADDR:MASTER_PORT served for clients that the program itself makes. Imports no torch.

torchrun's agent hosts that store before any worker runs, and some programs only connect to it. Here init_process_group() has
rank 0 host it. A client that is made in another way is served by what hosts it already, else rank 0 hosts it in its own
process, where init_process_group() finds it, and another worker of node 0 starts `store_server.py`. Workers of other nodes
wait for one of these, as clients do.
"""

import os
import socket
import subprocess
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# of TCPStore(), by position
PARAMETERS = ("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers", "multi_tenant")


def serve(distributed: "Any", server: str) -> None:
    """Have it served; `distributed` is torch.distributed, `server` the path of store_server.py."""
    store = getattr(distributed, "TCPStore", None)
    if store is None:  # a torch that was built without torch.distributed
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    one_node = os.environ["GROUP_WORLD_SIZE"] == "1"
    agent = os.getppid()
    construct: Any = store.__init__
    kept = []

    def host() -> None:
        if is_served(address, port):
            return
        if os.environ["RANK"] == "0":
            kept.append(store(address, port, None, True, wait_for_workers=False, multi_tenant=True))
        elif os.environ["GROUP_RANK"] == "0":
            nothing = subprocess.DEVNULL
            subprocess.run(
                [sys.executable, server, str(agent)], stdin=nothing, stdout=nothing, stderr=nothing, check=False
            )

    def __init__(self: "Any", *args: "Any", **keywords: "Any") -> None:  # noqa: N807 - it becomes that method
        asked = {**dict(zip(PARAMETERS, args)), **keywords}  # noqa: B905 - `strict` is new in 3.10
        if asked.get("port") != port or not (one_node or asked.get("host_name") == address):
            construct(self, *args, **keywords)
            return
        # init_process_group() alone makes them with several tenants
        if not asked.get("is_master") and not asked.get("multi_tenant"):
            host()
        try:
            construct(self, *args, **keywords)
        except RuntimeError as error:
            taken = "address already in use" in str(error).lower()
            if not (taken and asked.get("is_master") and asked.get("multi_tenant")):
                raise
            construct(self, **{**asked, "is_master": False})  # another worker wanted it earlier and has it hosted

    store.__init__ = __init__


def is_served(address: str, port: int) -> bool:
    """Say whether a process listens there."""
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True
