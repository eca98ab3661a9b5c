"""From a job on several hosts, real or simulated, to what each of them is told, and to the loop behind the front.

What a host is to do goes through the pipe to it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial

from ddplaunch.agent import front
from ddplaunch.cluster import Allocation
from ddplaunch.errors import LaunchError
from ddplaunch.options import token as secret
from ddplaunch.output.streams import Screen
from ddplaunch.process.linux import raise_open_files
from ddplaunch.remote import commands, dispatcher, environment, messages
from ddplaunch.remote import order as orders
from ddplaunch.remote.connection import AgentStart
from ddplaunch.report.run_folder import run_id_of
from ddplaunch.spec import JobSpec


def lead(
    spec: JobSpec,
    env: Mapping[str, str],
    allocation: Allocation,
    *,
    serve: Callable[..., int] = front.run,
    answers: bool = False,
) -> int:
    """Start an agent on each host, show what they show until all have ended, and give the status of the job.

    `serve` and `answers` are those of `here.carry_out`.

    Raises:
        LaunchError: nothing was started.
    """
    if spec.debug_rank is not None:
        raise LaunchError(
            f"{spec.asked('debug_rank', spec.debug_rank)}: a worker on another host cannot have this terminal",
            hint="debug it in a job of one node, on that host",
        )
    python = spec.remote_python or sys.executable
    signals = front.passed_on(spec.signals)
    job = dispatcher.RemoteJob(
        calls=_calls(spec, env, allocation, python, answers=answers),
        starter=allocation.starter,
        python=python,
        least=allocation.nnodes[0],
        env=secret.public(env),
        open_files=raise_open_files(),
        signals=signals,
        stops=frozenset(spec.stop_signals) - frozenset(spec.forward_signals),
        silence=spec.heartbeat_timeout,
        meeting_time=spec.rdzv_timeout,
        grace_period=spec.grace_period,
        quiet=spec.verbosity < 0,
        answers=answers,
        chaos=spec.chaos,
    )
    return serve(partial(dispatcher.run, job), signals, spec.stop_signals, meanwhile=_nothing)


def _calls(
    spec: JobSpec, env: Mapping[str, str], allocation: Allocation, python: str, *, answers: bool
) -> tuple[AgentStart, ...]:
    try:
        cwd = os.getcwd()
    except OSError as error:
        raise LaunchError(
            f"the current folder: {(error.strerror or str(error)).lower()}",
            hint="ddplaunch runs on each host in the folder where it is typed: change to one that exists",
        ) from None
    run_id = run_id_of(spec)
    token = os.urandom(32).hex()
    going_along, screen = environment.sent(secret.public(env)), Screen.here(env)
    return tuple(
        AgentStart(
            place=place,
            host=host.name,
            argv=commands.argv(allocation.starter, host.name, python, spec.heartbeat_timeout),
            order=messages.encode(
                orders.order(
                    spec,
                    allocation,
                    place,
                    env=going_along,
                    cwd=cwd,
                    run_id=run_id,
                    token=token,
                    screen=screen,
                    answers=answers,
                )
            ),
        )
        for place, host in enumerate(allocation.start)
    )


def _nothing() -> None:
    """There is no run folder here to be tidied."""
