"""The agent (it supervises the workers of a node) as its front (the process that forked it) sees it: started, watched, reaped.

Shows and decides nothing. The front is the command that was typed, or on another host `HostFront`.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from math import ceil

from ddplaunch.launcher.decide.node import TIDY_TIMEOUT
from ddplaunch.reach.pipes import ASKING_SIGNAL, HANDLER_ANSWERS, IS_RUNNING, LOOP_ANSWERS, FrontPipes, Replies
from ddplaunch.system import exitcodes
from ddplaunch.system.errors import MORE_OPEN_FILES, LaunchError, indented, visible
from ddplaunch.system.process import clock
from ddplaunch.system.process.fork import fork
from ddplaunch.system.process.linux import (
    become_subreaper,
    check_kernel,
    of_open_files,
    return_freed_memory,
    signal_at_end_of,
)
from ddplaunch.system.process.tree import (
    Process,
    descendants,
    has_ended,
    let_tidy,
    reap,
    signal_process,
    state_of,
    tidies,
)
from ddplaunch.system.words import duration

INTERVAL = 0.5  # seconds from one question of a `Question` to the next
_SLEEP_TIMEOUT = 1.0  # seconds that what was killed may stay in uninterruptible sleep
_LOOK_EVERY = 0.01  # seconds from one look at what was killed to the next
KILL_TIMEOUT = 5.0  # seconds to wait for SIGKILL to work
# questions are counted, not seconds, so that a pause of both processes gives no agent up
_MOST_UNANSWERED = 4  # in a row: 2 s
_LONGEST_WITHOUT_LOOP = 30.0  # seconds in which only the handler answers, longer than any call should take
_MOST_WITHOUT_LOOP = round(_LONGEST_WITHOUT_LOOP / INTERVAL)
# heartbeat timeouts until front and agent give each other up: the other nodes have said before that this one is silent
PATIENCE = 1.5
# what a question without an answer counts by the state of the agent, which goes on by itself: a debugger holds it, or its disk
# does not answer, as of a file server that starts again
_WEIGHT_BY_STATE = {"t": 1 / 16, "D": 1 / 16}
_LONGEST_INTERVAL = 5.0  # seconds from one question of a watch to the next, while there is no answer
_TIMES_LONGER_AT_REST = 2  # times as long while all is well: the kernel tells at once that an agent is stopped
# looks in a row at which a lease is over before the agent is killed, half a second in all: an agent that runs kills its workers
# itself, or says after a pause of both processes that the lease goes on
_MOST_LAPSED = 3
LOOK_AT_LAPSE = 0.25  # seconds from one of them to the next: the rest of `KILLED_WITHIN` is for the kernel


def start(
    agent: Callable[[FrontPipes], int],
    blocked: Collection[int],
    report_failure: Callable[[LaunchError, FrontPipes], None] = lambda error, _: _print(error),
) -> AgentProcess:
    """Fork, run `agent` in the child, in a session of its own; return the child, with the front's side of the pipes.

    The signals `blocked` are blocked in both processes from then on, so that none is lost until each handles them.
    `report_failure` is called in the child if the agent cannot do its work for a reason that the user can mend.

    Raises:
        LaunchError: the machine has no room for the agent, or its kernel lacks what supervision needs.
    """
    become_subreaper()
    return_freed_memory()  # before the fork, so for both processes
    try:
        check_kernel()
        pipes = FrontPipes.make()
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        pid = fork()
    except OSError as error:
        raise _no_room(error) from None
    if pid == 0:
        status = exitcodes.BUG  # unless `agent` returns another
        try:
            os.setsid()
            # the kernel sends SIGCONT when the front ends, so that an agent which is stopped goes on and sees that end
            signal_at_end_of(pipes.front, signal.SIGCONT)
            pipes.agent_side()  # closes the front's
            status = _run(agent, pipes, report_failure)
        except BaseException:  # noqa: BLE001 - whatever it is, it ends in this process
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    pipes.front_side()
    return AgentProcess(pid, pipes)


def _run(
    agent: Callable[[FrontPipes], int], pipes: FrontPipes, report_failure: Callable[[LaunchError, FrontPipes], None]
) -> int:
    """Run the agent in this process and return its exit status; a limit of open files, and any LaunchError, is reported."""
    try:
        return agent(pipes)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise  # a bug of ours
        failure = _no_room(error)
    except LaunchError as error:
        failure = error
    report_failure(failure, pipes)
    if failure.then is not None:  # as to tell the other nodes
        failure.then()
    return failure.status


def _print(error: LaunchError) -> None:
    os.write(2, error.render().encode())


def decide_start(pipes: FrontPipes) -> bool:
    """Take the byte by which it is decided, once and for all, that the job begins (the agent), or never will (the front)."""
    try:
        return bool(os.read(pipes.start[0], 1))
    except BlockingIOError:
        return False


def prevented_by(signum: int) -> str:
    """Say that a signal has ended the job before it began."""
    keys = " (Ctrl-C)" if signum == signal.SIGINT else ""
    return f"ddplaunch: stopped by {signal.Signals(signum).name}{keys} before the workers were started\n"


def _no_room(error: OSError) -> LaunchError:
    reason = (error.strerror or "").lower() + of_open_files(error.errno)
    hint = "the machine is at a limit: see `ulimit -u`"
    if error.errno == errno.EMFILE:
        hint = MORE_OPEN_FILES
    return LaunchError(f"ddplaunch cannot start: {reason}", hint=hint, status=exitcodes.NOT_EXECUTABLE)


class AgentProcess:
    """The agent as its front sees it, which has forked it, asks it whether it runs, and ends all that it leaves."""

    def __init__(self, pid: int, pipes: FrontPipes) -> None:
        """Speak with the agent over the front's side of these pipes."""
        self.pid = pid
        self.pipes = pipes
        self.replies = Replies(pipes.replies[0])

    @property
    def has_ended(self) -> bool:
        """Whether the agent has ended; it may be yet to be reaped."""
        return has_ended(self.pid)

    @property
    def is_stopped(self) -> bool:
        """Whether the agent is stopped, as by SIGSTOP."""
        return self.state == "T"

    @property
    def state(self) -> str:
        """The letter of proc(5) for the state of the agent."""
        return state_of(self.pid)

    def ask(self, *, with_handler: bool = True) -> None:
        """Ask the agent's loop whether it runs, and its signal handler, by a signal that wakes the agent once more."""
        self.pipes.request(IS_RUNNING)
        if with_handler:
            with suppress(ProcessLookupError):
                os.kill(self.pid, ASKING_SIGNAL)

    def describe_silence(self) -> str:
        """Say why the agent does not run, as far as its state tells; "" if that tells nothing."""
        states = {
            "T": " (it is stopped, as by SIGSTOP)",
            "t": " (a debugger holds it)",
            "D": " (it is in uninterruptible sleep)",
        }
        return states.get(self.state, "")

    def prevent_start(self) -> bool:
        """Kill an agent that still gets ready, for which its files may have to come from far; False if the job has begun."""
        if is_prevented := decide_start(self.pipes):
            self.kill()
        return is_prevented

    def kill(self) -> None:
        """Kill the agent, which does not respond, and every process below it."""
        os.kill(self.pid, signal.SIGKILL)
        _kill_below(self.pid, (self.pid,), lambda _: False, kills_sleeping=True)

    def sweep(self) -> None:
        """Kill and reap every process that the agent, which has ended, left, except for those that it has named to be spared.

        An agent that was not killed has killed its processes itself. What is left then may be the writer of files of a simulated
        node, whose own agent was killed: in uninterruptible sleep, the writer is waited for, but not killed.
        """
        info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        was_killed = info is not None and info.si_code != os.CLD_EXITED
        _kill_below(os.getpid(), (self.pid,), self.pipes.is_spared, kills_sleeping=was_killed)

    def reap(self) -> int:
        """Wait for the agent's end, end what it left, and return its wait status."""
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # the pid stays taken while its processes are swept
        self.sweep()
        return os.waitpid(self.pid, 0)[1]


class Watch:
    """Asks an agent, all its life, whether it runs, and gives up one that does not; by these questions the agent sees its front.

    Has no timer: its owner, the front, calls `keeps_lease` and `look`, each time `wait` seconds after the last. Questions are
    counted, so a pause of both processes gives nobody up.
    """

    def __init__(self, agent: AgentProcess, heartbeat_timeout: float) -> None:
        """Ask the first time. An agent without any answer for PATIENCE times the heartbeat timeout (seconds) does not run.

        One whose loop alone does not answer, though its signal handler does, has _LONGEST_WITHOUT_LOOP seconds at least.
        """
        self.interval = watch_interval(heartbeat_timeout)  # seconds from one question to the next
        self._waited = self.interval  # seconds, as `wait` last returned them
        self._patience = PATIENCE * heartbeat_timeout  # seconds
        self._agent = agent
        self._most_unanswered = ceil(self._patience / self.interval)  # questions
        self._most_without_loop = ceil(max(self._patience, _LONGEST_WITHOUT_LOOP) / self.interval)  # questions
        self._has_begun = False  # the loop has answered once: before, the agent may import from a slow disk
        # questions in a row without any answer, and without one of the loop; they weigh less while a debugger holds the agent
        self._unanswered = 0.0
        self._without_loop = 0.0
        self.silent = 0.0  # seconds in which the loop has not answered
        self._heartbeat_timeout = heartbeat_timeout
        self._lapsed = 0  # looks in a row at which the lease of the workers (until when they may live) was over
        agent.ask()

    def look(self) -> bool:
        """Take the answers to the last question and ask again; return whether the agent runs, as far as is known.

        An agent whose loop never answered still imports its modules, and is given up only if it is stopped.
        """
        loop_answered, any_answered = self._take_answers()  # the loop, and the loop or the signal handler
        self._has_begun = self._has_begun or loop_answered
        state = "" if loop_answered else self._agent.state
        may_still_import = not self._has_begun and state != "T"  # T: it is stopped
        if may_still_import or loop_answered:
            self._unanswered = self._without_loop = self.silent = 0.0
        else:
            # a debugger that holds the agent, or a disk that it waits for, lets it go on by itself: that weighs less
            weight = 1.0 if any_answered else _WEIGHT_BY_STATE.get(state, 1.0)
            weight *= min(1.0, self._waited / self.interval)  # a question that had less time to be answered says less
            self._unanswered = 0.0 if any_answered else self._unanswered + weight
            self._without_loop += weight
            self.silent += self._waited
        # the handler's signal wakes the agent once more: only where its loop may be in a long call
        self._agent.ask(with_handler=not loop_answered)
        return self._unanswered < self._most_unanswered and self._without_loop < self._most_without_loop

    def _take_answers(self) -> tuple[bool, bool]:
        """Return whether the agent's loop has answered, and whether it or the signal handler has; forget these answers."""
        replies = self._agent.replies
        replies.take()
        loop_answered, any_answered = replies.has(LOOP_ANSWERS), replies.has(LOOP_ANSWERS + HANDLER_ANSWERS)
        replies.forget(LOOP_ANSWERS + HANDLER_ANSWERS)
        return loop_answered, any_answered

    def keeps_lease(self) -> bool:
        """Look whether the workers may still live, and return False once their lease was over at several looks in a row.

        Then the agent has not killed them, so that it does not run.
        """
        self._lapsed = 0 if self._agent.pipes.lease_left() else self._lapsed + 1
        if self._lapsed < _MOST_LAPSED:
            return True
        self.silent = max(self.silent, self._heartbeat_timeout)  # so long ago the agent has sent its last renewal
        return False

    def wait(self, *, may_rest: bool = True) -> float:
        """Return the seconds until the owner is to look again: more of them while all is well, none beyond the lease.

        An owner that `may_rest` so long calls this again at SIGCHLD, by which the kernel tells of an agent that was stopped.
        """
        is_well = may_rest and not self.silent and not self._agent.is_stopped
        until_question = self.interval * (_TIMES_LONGER_AT_REST if is_well else 1)
        until_lapse = self._agent.pipes.lease_left() or LOOK_AT_LAPSE
        self._waited = min(until_question, until_lapse)
        return self._waited

    def describe(self) -> str:
        """Say which agent has not run, for how long as far as its loop shows, and why."""
        return f"(pid {self._agent.pid}) did not respond for {duration(self.silent)}{self._agent.describe_silence()}"

    @property
    def gives_up_after(self) -> float:
        """The seconds without any answer after which the agent is given up, if its state does not change."""
        return self._patience / _WEIGHT_BY_STATE.get(self._agent.state, 1.0)


def watch_interval(heartbeat_timeout: float) -> float:
    """Return the seconds from one question of a front to the next, while there is no answer."""
    return min(heartbeat_timeout / 2, _LONGEST_INTERVAL)


def longest_wait(heartbeat_timeout: float) -> float:
    """Return the seconds in which the next question of a front comes, if that runs."""
    return (_TIMES_LONGER_AT_REST + 1) * watch_interval(heartbeat_timeout)


class Question:
    """Asks an agent that has to end at once whether it runs, every INTERVAL seconds until its loop answers. Has no timer.

    The loop answers a byte in the pipe. A signal handler answers a signal, even while the loop is in a long call, such as a
    sweep or a write to a slow disk. So a stopped agent is given up within seconds, and a slow one has time.
    """

    def __init__(self, agent: AgentProcess) -> None:
        self._agent = agent
        self._replies = agent.replies
        self._unanswered = 0  # questions in a row without any answer
        self._without_loop = 0  # questions that the loop has not answered, though the signal handler may have
        agent.replies.forget(LOOP_ANSWERS + HANDLER_ANSWERS)  # those to the questions of a `Watch`
        agent.ask()

    def has_answer(self) -> bool:
        """Whether the agent's loop has answered."""
        self._replies.take()
        return self._replies.has(LOOP_ANSWERS)

    def repeat(self) -> bool:
        """Ask again, INTERVAL seconds after the last question; False: the agent has not responded for too long, so give it up.

        Called while `has_answer` is False: the loop has not answered any question yet.
        """
        self._replies.take()
        handler_answered = self._replies.has(HANDLER_ANSWERS)
        self._unanswered = 0 if handler_answered else self._unanswered + 1
        self._without_loop += 1
        if self._unanswered >= _MOST_UNANSWERED or self._without_loop >= _MOST_WITHOUT_LOOP:
            return False
        self._replies.forget(HANDLER_ANSWERS)
        self._agent.ask()
        return True


def _kill_below(root: int, keep: Collection[int], spares: Callable[[Process], bool], *, kills_sleeping: bool) -> None:
    """Kill and reap all descendants of `root`, except for the pids `keep` and for those of which `spares` returns True.

    Processes in uninterruptible sleep die when they wake up: mostly in an instant, as when the kernel takes their memory back,
    else whenever their disk answers. They are waited for a little, and killed only if `kills_sleeping`. Processes that tidy (they
    clean up after others, and then exit) have TIDY_TIMEOUT seconds to end by themselves.
    """
    not_ours: set[int] = set(keep)  # and those that we may not signal
    waited_for: set[int] = set()  # pids seen in uninterruptible sleep that are not to be killed
    began = clock.now()
    while below := [found for found in descendants(root) if found.pid not in not_ours and not spares(found)]:
        if not kills_sleeping:  # a process may wake and sleep again for each line that it writes: once seen is enough
            waited_for.update(found.pid for found in below if found.state == "D")
        may_tidy = clock.now() < began + TIDY_TIMEOUT
        tidying = [found for found in below if may_tidy and tidies(found)]
        for found in tidying:
            let_tidy(found)
        to_kill = [found for found in below if found.pid not in waited_for and found not in tidying]
        not_ours.update(found.pid for found in to_kill if not signal_process(found, signal.SIGKILL))
        reap(keep)
        dies_at_once = [found for found in to_kill if found.state != "D"]
        if not dies_at_once:
            if not tidying and clock.now() >= began + _SLEEP_TIMEOUT:
                return
            time.sleep(_LOOK_EVERY)


def status_of(agent: int, wait_status: int, host: str = "") -> tuple[int, str]:
    """Return the status of the job by how the agent (its pid) ended, and a line for the user; "" if the agent printed all itself.

    `host` is given where the line goes to a command that has started agents, which itself says that the node is lost.
    """
    if os.WIFSIGNALED(wait_status):
        by = signal.Signals(os.WTERMSIG(wait_status)).name
        whose = f"the agent on {host}" if host else "ddplaunch's agent"
        kind = "ddplaunch" if host else "error"
        text = f"{kind}: {whose} (pid {agent}) was killed by {by}; its workers were ended with it\n"
        return exitcodes.NODE_LOST, text + describe_leftovers()
    return os.WEXITSTATUS(wait_status), ""


def describe_leftovers() -> str:
    """Name the processes below this one that could not be ended; "" if there are none."""
    left = ", ".join(map(str, descendants(os.getpid())))
    return visible(f"ddplaunch: could not be ended: {indented(left)}\n") if left else ""
