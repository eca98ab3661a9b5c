"""Whether ssh reaches a host through another one, whose sshd all such hosts share: as the user's configuration of ssh says."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

# seconds for `ssh -G`, which connects to no host; a command in the configuration (`Match exec`) may take long
_WITHIN = 1.0
_THROUGH_ANOTHER = ("proxyjump", "proxycommand")  # as `ssh -G` writes them


def is_ssh(argv: Sequence[str]) -> bool:
    """Return whether this is a command of ssh."""
    return os.path.basename(argv[0]) == "ssh"


def leads_through_another(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """Return whether this command of ssh, whose last word is for the host, leads there through a jump host or a command.

    For a child that is asked, since the answer may take a second.
    """
    import subprocess  # takes 10 ms, and few jobs have many hosts

    try:
        done = subprocess.run(
            [argv[0], "-G", *argv[1:-1]],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_WITHIN,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    settings = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if b" " in line.strip())
    return any(settings.get(name.encode(), b"none") != b"none" for name in _THROUGH_ANOTHER)
