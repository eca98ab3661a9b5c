"""The commands that start an agent on a host. Pure. They hold no secret and no variable of the user's."""

from __future__ import annotations

import shlex

REMOTE = ("-P", "-m", "ddplaunch.launcher.host")  # -P: a folder that happens to be current holds no modules of ours
_PROBES = 3  # keepalives without a reply after which ssh ends


def argv(starter: str, host: str, python: str, heartbeat_timeout: float) -> tuple[str, ...]:
    """Return the command that starts `python -m ddplaunch.launcher.host` on the host; `heartbeat_timeout` in seconds."""
    match starter:
        case "simulate":
            return (python, *REMOTE)
        case "blaunch":
            return ("blaunch", host, python, *REMOTE)
    return (*_ssh(heartbeat_timeout), host, f"exec {shlex.join((python, *REMOTE))}")


def _ssh(heartbeat_timeout: float) -> tuple[str, ...]:
    """ssh_config(5). The user's own configuration applies to all that is not set here."""
    options = {
        "BatchMode": "yes",  # no password prompt: there is no terminal
        "ConnectTimeout": str(max(5, round(heartbeat_timeout))),
        "ServerAliveInterval": str(max(1, round(heartbeat_timeout / _PROBES))),
        "ServerAliveCountMax": str(_PROBES),
        "ControlPath": "none",  # a connection of our own: one that is shared may be slow or full, and end with others' work
        "ClearAllForwardings": "yes",  # 64 connections cannot all forward one port
        "RemoteCommand": "none",
    }
    return ("ssh", "-T", "-x", *(word for name, value in options.items() for word in ("-o", f"{name}={value}")))
