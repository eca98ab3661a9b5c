"""The job's part on this node: this process plans it, then becomes the front of a forked agent, which runs the workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.launcher.decide.node import Policy
from ddplaunch.launcher.node import begin, front
from ddplaunch.launcher.node.job import AgentJob, JobInputs
from ddplaunch.launcher.node.signals import passed_on
from ddplaunch.plan import Plan
from ddplaunch.plan.cluster import AllocatedJob
from ddplaunch.plan.cluster.endpoints import LOOPBACK
from ddplaunch.plan.devices.node import Node, torch_build
from ddplaunch.plan.make import make_plan
from ddplaunch.record.folders import run_id_of
from ddplaunch.spec.error_file import ErrorFiles
from ddplaunch.spec.job import JobSpec, ProgramKind
from ddplaunch.spec.outcome import ClusterEnding, ClusterQuestions
from ddplaunch.system.console.streams import Screen
from ddplaunch.system.errors import LaunchError, own_imports
from ddplaunch.system.net import port
from ddplaunch.system.process.fork import debugger_follows_children, unfollowed_by_debugger
from ddplaunch.system.process.linux import raise_open_files
from ddplaunch.system.words import duration

if TYPE_CHECKING:  # one node needs none of it, or its agent alone
    import socket

    from ddplaunch.launcher.node.job import Connect
    from ddplaunch.launcher.workers.warm import Interpreter
    from ddplaunch.reach.slurm.job import SlurmRequeue


_STACKS_WITHIN = 2.0  # seconds that workers have to write their stacks before they are stopped
_CHECKS_IN_HANG_TIMEOUT = 4  # of whether workers make progress
# seconds from check to check without --hang-timeout: each takes 3 ms, and this is how exactly the length of a rest is known
_QUIET_CHECK_EVERY = 10.0
_PTY_HINT = ": `srun --pty` gives one to the first node"
# with -c the working directory comes first, where ./importlib would be run; -P, which leaves it out, is of Python 3.11
_HAS_DEBUGPY = """\
import sys
if sys.path[:1] == [""]:
    del sys.path[0]
import importlib.util
sys.exit(importlib.util.find_spec("debugpy") is None)
"""
_DEBUGPY_WITHIN = 30.0  # seconds
_DISK_ANSWERS_WITHIN = 1.0  # seconds


def run(
    allocated: AllocatedJob,
    node: Node,
    *,
    screen: Screen | None = None,
    reports_job: bool | None = None,
    reports_to_caller: bool = False,
    serve: Callable[..., int] | None = None,
    carried: socket.socket | None = None,
) -> int:
    """Run the job's part on this node and give the exit status: plan it, fork the agent, and serve the agent as its front.

    `screen` is what is written to, if that is not our stdout and stderr. `reports_job`: this node reports the job as a whole;
    None: it does unless a node with rank 0 does on the same screen. `reports_to_caller`: how the job ended is for a caller in
    Python, in place of the user. `serve` forks and serves the agent; None: `front.run`. `carried` is the agent's
    connection to the coordinator, where what has started the agent carries it.

    Raises LaunchError: nothing was started.
    """
    spec, env, allocation = allocated.spec, allocated.public_env, allocated.allocation
    has_terminal = False  # the terminal belongs to this node if the screen is our own
    if screen is None:
        screen = Screen.here(env, has_rows=spec.live)
        has_terminal = os.isatty(0) or bool(screen.terminals)
    node = replace(node, has_terminal=has_terminal)
    # with several nodes the plan is a draft: it is made again once the agents have agreed on ranks and addresses
    draft = make_plan(spec, allocation, node, run_id=run_id_of(spec))
    _check_ports(allocated, draft)
    _check_debuggers(allocated, draft)
    check_watched_files(spec)
    signals = passed_on(spec.signals)
    if reports_job is None:  # where the output of all nodes is shown in one place, the node of rank 0 reports
        reports_job = not allocation.has_front and (0 in draft.ranks or not allocation.has_one_screen)
    raise_open_files()  # before the interpreter is kept warm: it inherits the limit
    warm, why_cold = _kept_warm(draft, env)
    inputs = JobInputs(
        spec=spec,
        env=env,
        allocation=allocation,
        node=node,
        draft=draft,
        screen=screen,
        error_files=ErrorFiles(draft.run_id, env.get("TMPDIR") or "/tmp"),
        reports_job=reports_job,
        reports_to_caller=reports_to_caller,
        cluster=_cluster_questions(allocated),
        warm=warm,
        why_cold=why_cold,
    )
    agent_job = AgentJob(
        policy=_policy(spec, draft),
        inputs=inputs,
        link=partial(_link, allocated, inputs, carried),
        signals=signals,
        sent_again=allocation.sent_again,  # signals that a scheduler sends twice
        cluster_signals_all=allocation.cluster == "slurm",  # Slurm may signal each process of a job itself
        requeue=_requeue(allocated, draft),
    )
    run_agent = partial(begin.run, agent_job)
    if serve is None:
        serve = partial(front.run, heartbeat_timeout=spec.heartbeat_timeout)
    try:
        return serve(run_agent, signals, spec.ending_signals, sent_again=allocation.sent_again)
    finally:
        inputs.error_files.remove()  # an agent that was killed has left them


def _policy(spec: JobSpec, draft: Plan) -> Policy:
    """Return what the agent's decisions need to know: what the user has asked for, about the workers of this node."""
    writes_stacks = spec.program.kind is not ProgramKind.COMMAND  # any other program is Python
    return Policy(
        ranks=draft.ranks,
        stop_signals=spec.ending_signals,
        grace_period=spec.grace_period,
        debug_rank=spec.debug_rank,
        notices=frozenset(spec.requeue_on),
        progress_interval=(spec.hang_timeout or 0.0) / _CHECKS_IN_HANG_TIMEOUT,  # 0: no --hang-timeout
        lax_progress_interval=_QUIET_CHECK_EVERY,  # without --hang-timeout, where a line tells of idle workers
        stacks_timeout=_STACKS_WITHIN if writes_stacks else 0.0,
    )


def _check_ports(allocated: AllocatedJob, draft: Plan) -> None:
    """Refuse a port that is taken where rank 0 is to use it, and a host without a loopback interface that works.

    A node that comes back to an elastic job on one machine may find the port taken by that job.

    Raises LaunchError: it is so.
    """
    if draft.master_port and 0 in draft.ranks and not allocated.allocation.is_elastic:
        port.reserve(draft.master_port, draft.reasons["master_port"], must_be_named=allocated.spec.no_control).release()
    if draft.world_size > 1 and draft.master_addr == LOOPBACK:
        port.check_loopback()


def _check_debuggers(allocated: AllocatedJob, draft: Plan) -> None:
    """Refuse a debugger in a worker of this node that lacks what it needs.

    Raises LaunchError: there is no terminal, or no debugpy.
    """
    spec = allocated.spec
    asked = spec.terminal_option  # the option, as typed; "" if none wants one
    may_be_here = spec.debug_rank is None or spec.debug_rank in draft.ranks  # None: in whichever worker fails
    has_terminal = os.isatty(0) and os.isatty(1)
    if asked and may_be_here and not has_terminal:
        hint = "run it in a terminal"
        if allocated.agents_meet:
            pty = _PTY_HINT if allocated.allocation.cluster == "slurm" else ""
            hint += f", on each node whose ranks it is for{pty}"
        raise LaunchError(
            f"{asked.partition(' ')[0]} needs a terminal for its worker, but stdin or stdout is none", hint=hint
        )
    if spec.debugpy_ranks is not None and draft.interpreter is not None:
        check_debugpy(draft.interpreter, allocated.public_env)


def check_watched_files(spec: JobSpec) -> None:
    """Refuse a folder in place of a file whose change means something: anything that is made in it changes it.

    Raises LaunchError: it is one.
    """
    for name, path in (("notice_file", spec.notice_file), ("stop_file", spec.stop_file)):
        if path is not None and _is_folder(path):
            hint = f"name a file in it: `{spec.typed(name, os.path.join(path, name.partition('_')[0]))}`"
            raise LaunchError(f"{spec.typed(name, path)} is a folder", hint=hint)


def _is_folder(path: str) -> bool:
    """Return whether a path is that of a folder; False if its disk hangs, with which the job starts all the same."""
    from ddplaunch.system.process.ask import AskedEnded, ask  # few jobs need it

    try:
        return ask(partial(os.path.isdir, path), _DISK_ANSWERS_WITHIN)
    except (OSError, AskedEnded):  # of which TimeoutError is one
        return False


def check_debugpy(python: str, env: Mapping[str, str]) -> None:
    """Check that the interpreter of the workers has debugpy. Raises LaunchError: it has none."""
    import shlex  # few jobs need it
    import subprocess

    try:
        with unfollowed_by_debugger():  # a debugger around this command would follow the interpreter, too
            asked = subprocess.run(
                [python, "-c", _HAS_DEBUGPY],
                env=env,
                timeout=_DEBUGPY_WITHIN,
                check=False,
                stdin=subprocess.DEVNULL,
                capture_output=True,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"--debugpy: {python} does not say whether it has debugpy: {error}") from None
    if asked.returncode:
        raise LaunchError(
            f"--debugpy needs debugpy, which {python} does not have",
            hint=f"{shlex.quote(python)} -m pip install debugpy",
        )


def _kept_warm(draft: Plan, env: Mapping[str, str]) -> tuple[Interpreter | None, str]:
    """Return the interpreter that is kept warm for such runs, or None, and a note for the user, or "".

    The note says that the interpreter is new, or why there is none; else, with a debugger around this command, why workers are
    not forked.
    """
    why_not = draft.reasons.get("warm", "")
    if draft.keep_warm is not None:
        from ddplaunch.launcher.workers import warm  # few jobs keep one

        try:
            interpreter, why_older_ends = warm.prepare(draft, env)
        except warm.CannotKeep as error:
            why_not = str(error)
        else:
            return interpreter, _note_of_new(draft, interpreter, why_older_ends) if interpreter.is_new else ""
    if why_not:
        return None, f"no interpreter is kept warm: {why_not}"
    forks_workers = draft.preload is not None
    is_fresh_for_debugger = not forks_workers and debugger_follows_children()
    why_fresh = draft.reasons.get("start", "") if is_fresh_for_debugger else ""
    return None, f"workers are fresh processes: {why_fresh}" if why_fresh else ""


def _note_of_new(draft: Plan, interpreter: Interpreter, why_older_ends: str) -> str:
    """Return a note that this run has started an interpreter, which stays after it."""
    if why_older_ends:
        return f"the interpreter that was kept warm is not used, and a new one is started: {why_older_ends}"
    modules = draft.preload or ("python",)
    stay = "stays" if len(modules) == 1 else "stay"
    return (
        f"{', '.join(modules)} {stay} imported when this run has ended, for "
        f"{duration(interpreter.seconds)} after the last that uses it; `ddplaunch warm --stop` ends it"
    )


def _cluster_questions(allocated: AllocatedJob) -> ClusterQuestions | None:
    """Return what Slurm can be asked at the end of the job; None outside of Slurm."""
    if allocated.allocation.cluster != "slurm":
        return None
    return _SlurmQuestions(allocated.public_env)


class _SlurmQuestions(Struct, frozen=True):
    """What Slurm can be asked about a job; the code that asks is imported then, since most jobs never ask."""

    env: Mapping[str, str]

    def why_ending(self) -> ClusterEnding:
        """Return why Slurm is ending this job."""
        from ddplaunch.reach.slurm.job import SlurmQuestions

        return SlurmQuestions(self.env).why_ending()

    def time_in_queue(self) -> ClusterEnding:
        """Return how long a batch job has waited in the queue."""
        from ddplaunch.reach.slurm.job import SlurmQuestions

        return SlurmQuestions(self.env).time_in_queue()


def _link(allocated: AllocatedJob, inputs: JobInputs, carried: socket.socket | None) -> Connect:
    """Return what connects the agent with the coordinator of all agents. If this agent is certainly that, listen at once.

    Agents of other nodes then connect and wait. Refused, they would try again and again while this process imports modules.
    Called in the agent. `carried` is the connection to the coordinator, if what has started the agent carries one.

    Raises LaunchError: this node is unfit, which `error.then()` tells the others later; or an import fails.
    """
    spec, env, allocation, draft = allocated.spec, allocated.env, allocated.allocation, inputs.draft
    if spec.health_check is not None:
        with own_imports():
            from ddplaunch.launcher.node import health  # few jobs have a check

        health.check(spec.health_check, inputs, env, several=allocated.agents_meet)
    if not allocated.agents_meet:
        with own_imports():
            from ddplaunch.launcher.job.local_link import coordinate_alone  # only the agent needs it

        return partial(coordinate_alone, spec, draft)
    listening_socket, rendezvous = None, allocation.rendezvous
    if rendezvous is not None and rendezvous.coordinator:  # neither False nor None: which agent comes first decides it
        with suppress(LaunchError):  # a port is taken, say: the coordinator tries again, and reports the error
            listening_socket = port.listen(rendezvous.listen, rendezvous.ports)
    with own_imports():
        from ddplaunch.launcher.job import join  # only jobs of several nodes need it

    build = torch_build(spec)
    torch = build.version if build else ""  # which the coordinator compares with that of other nodes
    return partial(
        join.join,
        join.prepare(spec, allocation, draft, env, torch=torch, listening_socket=listening_socket, carried=carried),
    )


def _requeue(allocated: AllocatedJob, draft: Plan) -> SlurmRequeue | None:
    """Return what queues the job again, if it may be for this process to do: that of rank 0."""
    spec = allocated.spec
    if not spec.requeue_on or 0 not in draft.ranks:
        return None
    from ddplaunch.reach.slurm.job import SlurmRequeue  # few jobs need it

    return SlurmRequeue(allocated.public_env, spec.max_requeues)
