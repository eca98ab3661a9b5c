"""What the coordinator sets for the agents of all nodes. Data only."""

from __future__ import annotations

from collections.abc import Sequence

from ddplaunch.control.handshake import Key
from ddplaunch.record import record


@record(kw_only=True)
class Terms:
    """What the coordinator sets for the agents of all nodes."""

    max_nodes: int
    run_id: str
    address: str | None  # MASTER_ADDR as the user or the cluster gave it; None: as the others reach this node
    key: Key
    listen: str | None  # numeric address to listen on; None: all
    ports: Sequence[int]  # candidates to listen on
    has_front: bool  # a command has started all agents, and connects to forward the user's signals
    heartbeat_timeout: float  # seconds after which a silent agent counts as lost
