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
    port: int | None = None  # where they find it, if that was said along with the address

    def __post_init__(self) -> None:
        assert 0 <= self.node_rank < len(self.hosts)
