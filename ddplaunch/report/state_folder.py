"""Where this user's programs keep what is to last, the folders of all runs there, and their names. Makes nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.spec import JobSpec

BEGAN = "%Y%m%d-%H%M%S"  # the time with which the names of runs begin that were given none


def state_folder(env: Mapping[str, str]) -> str | None:
    """Return the folder in which programs of this user keep what is to last; None if the user has no home."""
    state = env.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # which the XDG standard says to ignore
        state = os.path.join(env.get("HOME") or _home_of_user(), ".local", "state")
    return state if os.path.isabs(state) else None


def _home_of_user() -> str:
    import pwd  # most environments say it; expanduser() would take an empty HOME for the root folder

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""


def runs_folder(env: Mapping[str, str]) -> str | None:
    """Return the folder of all runs of this user that have no --log-dir; None if the user has no home."""
    state = state_folder(env)
    return None if state is None else os.path.join(state, "ddplaunch", "runs")


def run_id_of(spec: JobSpec) -> str:
    """Return the name of this run: as was asked, or one that no other run has."""
    return spec.run_id or f"{time.strftime(BEGAN)}-{os.urandom(2).hex()}"
