"""Checks, before anything starts, that the interpreter of the workers has debugpy."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping

from ddplaunch.errors import LaunchError

# with -c the working directory comes first, where ./importlib would be run; -P, which leaves it out, is of Python 3.11
_HAS_IT = """\
import sys
if sys.path[:1] == [""]:
    del sys.path[0]
import importlib.util
sys.exit(importlib.util.find_spec("debugpy") is None)
"""
_WITHIN = 30.0  # seconds


def check(python: str, env: Mapping[str, str]) -> None:
    """Check that.

    Raises:
        LaunchError: it has none.
    """
    try:
        asked = subprocess.run([python, "-c", _HAS_IT], env=env, timeout=_WITHIN, check=False, capture_output=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"--debugpy: {python} does not say whether it has debugpy: {error}") from None
    if asked.returncode:
        raise LaunchError(
            f"--debugpy needs debugpy, which {python} does not have",
            hint=f"{shlex.quote(python)} -m pip install debugpy",
        )
