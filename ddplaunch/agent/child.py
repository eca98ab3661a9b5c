"""The agent as a child process: forked, observed, reaped with all that it left. Shows and decides nothing."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Collection

from ddplaunch import exitcodes
from ddplaunch.agent.pipes import FrontPipes
from ddplaunch.errors import LaunchError, below, visible
from ddplaunch.process.linux import become_subreaper, check_kernel, signal_at_end_of
from ddplaunch.process.tree import descendants, reap, signal_process


def start(agent: Callable[[FrontPipes], int], blocked: Collection[int]) -> tuple[int, FrontPipes]:
    """Fork, run `agent` in the child, in a session of its own; give its pid and our side of the pipes.

    The signals `blocked` are blocked in both processes from then on, so that none is lost until each handles them.

    Raises:
        LaunchError: the machine has no room for the agent, or its kernel lacks what supervision needs.
    """
    become_subreaper()
    try:
        check_kernel()
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
            # lets a stopped agent go on, so that it sees the end of the front; see `SignalSource`
            signal_at_end_of(pipes.front, signal.SIGCONT)
            pipes.agent_side()
            status = agent(pipes)
        except BaseException:  # noqa: BLE001 - whatever it is, it ends in this process
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    pipes.front_side()
    return pid, pipes


def has_ended(agent: int) -> bool:
    """Whether the agent has ended, reaped or not; it is not reaped here."""
    try:
        return os.waitid(os.P_PID, agent, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:
        return True


def sweep(agent: int) -> None:
    """Kill and reap every process that the agent, which has ended, left."""
    _kill_below(os.getpid(), keep=(agent,))


def kill(agent: int) -> None:
    """Kill the agent, which does not respond, and every process below it."""
    os.kill(agent, signal.SIGKILL)
    _kill_below(agent, keep=(agent,))


def _kill_below(root: int, *, keep: Collection[int]) -> None:
    """Kill what descends from `root`, but for what is in uninterruptible sleep or only another user may end."""
    refused: set[int] = set(keep)
    while below := [found for found in descendants(root) if found.state != "D" and found.pid not in refused]:
        refused.update(found.pid for found in below if not signal_process(found, signal.SIGKILL))
        reap(keep)


def wait_ended(agent: int, timeout: float) -> bool:
    """Wait until the agent has ended, at most so many seconds; return whether it has. It is not reaped."""
    pidfd = os.pidfd_open(agent)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll(timeout * 1000)
    os.close(pidfd)
    return has_ended(agent)


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
        return exitcodes.NODE_LOST, text + left_over()
    return os.WEXITSTATUS(wait_status), ""


def left_over() -> str:
    """Name the processes below this one that could not be ended; "" if there are none."""
    left = ", ".join(map(str, descendants(os.getpid())))
    return visible(f"ddplaunch: could not be ended: {below(left)}\n") if left else ""
