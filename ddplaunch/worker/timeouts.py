"""Raises the timeouts of process groups where a worker may be held by a debugger: the others wait for it. Imports no torch."""

import functools
from datetime import timedelta

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LONG = timedelta(days=7)


def raise_all(distributed: "Any") -> None:
    """Return every process group that will be made so much time, whatever the program gives it; a torch without it is left."""
    module: Any = distributed.distributed_c10d
    make = module._new_process_group_helper

    @functools.wraps(make)
    def patient(*args: "Any", **keywords: "Any") -> "Any":
        if isinstance(keywords.get("timeout"), timedelta):
            keywords["timeout"] = LONG
        return make(*args, **keywords)

    module._new_process_group_helper = patient
