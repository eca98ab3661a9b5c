"""What the coordinator lays down for all nodes. Data only."""

from __future__ import annotations

from collections.abc import Sequence

from ddplaunch.control.handshake import Key
from ddplaunch.record import record
from ddplaunch.supervise import job


@record(kw_only=True)
class Terms:
    """What the coordinator lays down for all nodes."""

    policy: job.Policy
    run_id: str
    address: str | None  # MASTER_ADDR as the user or the cluster gave it; None: as the others reach this node
    port: int  # MASTER_PORT; 0: a free one for each generation
    key: Key
    listen: str | None  # numeric address to listen on; None: all
    ports: Sequence[int]  # candidates to listen on
    silence: float  # seconds after which a silent agent counts as lost
