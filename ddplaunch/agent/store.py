"""Hosts torch's store at MASTER_PORT for workers of other nodes, where none of node 0 does. Imports no torch: a child does."""

from __future__ import annotations

import os
from contextlib import suppress

from ddplaunch.agent.context import WorkerSetup
from ddplaunch.plan.variables import environment
from ddplaunch.process.child import StartError, Stdio, handled_signals, start

_SERVER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "worker", "store.py")


def host(setup: WorkerSetup) -> None:
    """Start the server in the workers' interpreter and environment; it is swept with what workers leave behind."""
    plan = setup.plan
    if plan.interpreter is None:  # of no program that uses torch
        return
    env = environment(setup.env, plan, plan.workers[0], generation=setup.generation, port=setup.port)
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        with suppress(StartError):  # the client then waits as long as it would without us
            argv = [plan.interpreter, _SERVER, str(os.getpid())]
            child = start(argv, env, Stdio(nothing, nothing, nothing), handled=handled_signals())
            os.close(child.pidfd)
            os.close(child.failure)
    finally:
        os.close(nothing)
