"""The commands that start an agent on a host. Pure. Nothing secret and no variable of the user's stands in them."""

from __future__ import annotations

import shlex

REMOTE = ("-P", "-m", "ddplaunch.launcher.host")  # -P: a folder that happens to be current holds no modules of ours
_PROBES = 3  # unanswered questions after which ssh ends


def argv(starter: str, host: str, python: str, silence: float) -> tuple[str, ...]:
    """Give the command that starts `python -m ddplaunch.launcher.host` on the host; `silence` seconds mean that it is lost."""
    match starter:
        case "simulate":
            return (python, *REMOTE)
        case "blaunch":
            return ("blaunch", host, python, *REMOTE)
    return (*_ssh(silence), host, f"exec {shlex.join((python, *REMOTE))}")


def _ssh(silence: float) -> tuple[str, ...]:
    """ssh_config(5). The user's own configuration counts for all that is not said here."""
    options = {
        "BatchMode": "yes",  # there is no terminal to ask for a password
        "ConnectTimeout": str(max(5, round(silence))),
        "ServerAliveInterval": str(max(1, round(silence / _PROBES))),
        "ServerAliveCountMax": str(_PROBES),
        "ControlMaster": "no",  # one that is there may be used, but none of ours may outlive the job
        "ClearAllForwardings": "yes",  # 64 connections cannot all forward one port
        "RemoteCommand": "none",
    }
    return ("ssh", "-T", "-x", *(word for name, value in options.items() for word in ("-o", f"{name}={value}")))
