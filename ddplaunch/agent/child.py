"""The agent as a child process: forked, observed, reaped with all that it left. Shows and decides nothing."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Collection

from ddplaunch import exitcodes
from ddplaunch.agent.pipes import FrontPipes
from ddplaunch.errors import LaunchError
from ddplaunch.process.linux import become_subreaper
from ddplaunch.process.tree import descendants, reap, signal_process


def start(agent: Callable[[FrontPipes], int], blocked: Collection[int]) -> tuple[int, FrontPipes]:
    """Fork, run `agent` in the child, in a session of its own; give its pid and our side of the pipes.

    The signals `blocked` are blocked in both processes from then on, so that none is lost until each handles them.

    Raises:
        LaunchError: the machine has no room for the agent.
    """
    become_subreaper()
    try:
        pipes = FrontPipes.make()
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        pid = os.fork()
    except OSError as error:
        raise LaunchError(
            f"ddplaunch cannot start: {(error.strerror or '').lower()}",
            hint="the machine is at a limit: see `ulimit -u` and `ulimit -n`",
            status=exitcodes.NOT_EXECUTABLE,
        ) from None
    if pid == 0:
        status = exitcodes.BUG
        try:
            os.setsid()
            pipes.agent_side()
            status = agent(pipes)
        except BaseException:  # noqa: BLE001 - whatever it is, it ends in this process
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    pipes.front_side()
    return pid, pipes


def has_ended(agent: int) -> bool:
    """Whether the agent has ended; it is not reaped."""
    return os.waitid(os.P_PID, agent, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def sweep(agent: int) -> None:
    """Kill and reap every process that the agent, which has ended, left."""
    while below := [process for process in descendants(os.getpid()) if process.state != "D"]:
        for process in below:
            signal_process(process, signal.SIGKILL)
        reap(keep=(agent,))


def reap_agent(agent: int) -> int:
    """Wait for the agent's end, end what it left, and give its wait status."""
    os.waitid(os.P_PID, agent, os.WEXITED | os.WNOWAIT)
    sweep(agent)
    return os.waitpid(agent, 0)[1]


def status_of(agent: int, wait_status: int, host: str = "") -> tuple[int, str]:
    """Give the status of the job by how the agent ended, and a text about it; "" if it printed all itself.

    `host` is named if this is printed on another one.
    """
    if os.WIFSIGNALED(wait_status):
        by = signal.Signals(os.WTERMSIG(wait_status)).name
        where = f" on {host}" if host else ""
        text = f"error: ddplaunch's agent{where} (pid {agent}) was killed by {by}; its workers were ended with it\n"
        return exitcodes.NODE_LOST, text
    return os.WEXITSTATUS(wait_status), ""
