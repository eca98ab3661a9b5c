"""Where this user's programs keep what is to last, and the folder of all runs there. Makes nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping


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
