"""WHERE: which hosts the job has and which of them this is. Pure: every answer comes from an environment mapping."""

from __future__ import annotations

from ddplaunch.record import record


@record(kw_only=True)
class Allocation:
    """The hosts that a job was given, in rank order, and our place among them."""

    cluster: str  # "local"
    hosts: tuple[str, ...]
    node_rank: int
    address: str  # where workers on every host find rank 0
    address_reason: str  # why there, in words or by the option that says so
    port: int | None  # where they find it; None: one that is reserved when the job starts
    port_reason: str
    notes: tuple[str, ...] = ()  # what a reader of the plan should know, one sentence each
