"""The command and the order for each host on which an agent is started; made where the job was typed.

Orders go through the pipes to the hosts, not onto their command lines.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping

from ddplaunch.plan.cluster import Allocation
from ddplaunch.reach.connections import AgentStart
from ddplaunch.reach.order import Orders, variables_to_send
from ddplaunch.spec.job import JobSpec
from ddplaunch.spec.options import token as secret
from ddplaunch.system.console.streams import Screen
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.words import why_failed

AGENT = "ddplaunch.launcher.start.host"


_PYTHON_OPTIONS = ("-P", "-m")  # -P: a folder that happens to be current holds no modules of ours


def agents(
    spec: JobSpec,
    env: Mapping[str, str],
    allocation: Allocation,
    python: str,
    run_id: str,
    *,
    token: str,
    module: str = AGENT,
) -> tuple[AgentStart, ...]:
    """Return the command and the order for each host; all orders hold this token (the secret of the job).

    `python` is the interpreter there, and `module` what it runs.

    Raises:
        LaunchError: the current folder, in which the job is to run on each host, does not exist.
    """
    try:
        cwd = os.getcwd()
    except OSError as error:
        raise LaunchError(
            f"the current folder: {why_failed(error)}",
            hint="ddplaunch runs on each host in the folder where it was typed: change to one that exists",
        ) from None
    orders = Orders(
        spec=spec,
        allocation=allocation,
        env=variables_to_send(secret.visible_to_workers(env)),
        cwd=cwd,
        run_id=run_id,
        token=token,
        screen=Screen.here(env, has_rows=spec.live),
    )
    return tuple(
        AgentStart(
            node_rank=node_rank,
            host=host.name,
            argv=argv(allocation.starter, host.name, python, spec.heartbeat_timeout, module),
            orders=orders,
        )
        for node_rank, host in enumerate(allocation.hosts_to_start_on)
    )


_MOST_UNANSWERED_PROBES = 3  # keepalives without a reply after which ssh ends


def argv(starter: str, host: str, python: str, heartbeat_timeout: float, module: str = AGENT) -> tuple[str, ...]:
    """Return the command that starts `python -m MODULE` on the host; `heartbeat_timeout` in seconds."""
    command = (python, *_PYTHON_OPTIONS, module)
    match starter:
        case "simulate":
            return command
        case "blaunch":
            return ("blaunch", host, *command)
    # ssh_config(5). The user's own configuration applies to all that is not set here
    options = {
        "BatchMode": "yes",  # no password prompt: there is no terminal
        "ConnectTimeout": str(max(5, round(heartbeat_timeout))),
        "ServerAliveInterval": str(max(1, round(heartbeat_timeout / _MOST_UNANSWERED_PROBES))),
        "ServerAliveCountMax": str(_MOST_UNANSWERED_PROBES),
        "ControlPath": "none",  # a connection of our own: one that the user's other sessions share may be slow, full or ended
        "ClearAllForwardings": "yes",  # 64 connections cannot all forward one port
        "RemoteCommand": "none",
    }
    words = (word for name, value in options.items() for word in ("-o", f"{name}={value}"))
    return ("ssh", "-T", "-x", *words, host, f"exec {shlex.join(command)}")
