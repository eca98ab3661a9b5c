"""Why the workers of a node are no longer to run."""

from __future__ import annotations

from enum import Enum, auto


class Why(Enum):
    """Why the workers are no longer to run."""

    FINISHED = auto()
    FAILED = auto()
    SIGNALLED = auto()
    TIMED_OUT = auto()
    FRONT_LOST = auto()
    TOLD = auto()  # by the coordinator
    DISMISSED = auto()
