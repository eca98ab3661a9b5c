"""What a node knows about the end of its workers besides the ends themselves. Pure data."""

from __future__ import annotations

from ddplaunch.record import record


@record(kw_only=True)
class Traces:
    """What only the node itself can say about the end of its workers."""

    oom_kills: int  # while the job ran
    shm: tuple[int, int] | None  # bytes of /dev/shm, and how many of them are free
    log_folder: str | None
