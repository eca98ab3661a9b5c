"""The job's part on this node: it is planned, equipped and handed to an agent, behind a front of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from ddplaunch.launcher.decide.node import Policy
from ddplaunch.launcher.node import begin, front
from ddplaunch.launcher.node.job import AgentJob, JobInputs
from ddplaunch.launcher.node.signals import passed_on
from ddplaunch.plan import Plan
from ddplaunch.plan.cluster import Allocation
from ddplaunch.plan.cluster.endpoints import LOOPBACK
from ddplaunch.plan.devices.node import Node, torch_build
from ddplaunch.plan.make import make_plan
from ddplaunch.record.folders import run_id_of
from ddplaunch.spec.error_file import ErrorFiles
from ddplaunch.spec.job import JobSpec, ProgramKind
from ddplaunch.spec.options import token
from ddplaunch.spec.outcome import ClusterQuestions
from ddplaunch.system.console.streams import Screen
from ddplaunch.system.errors import LaunchError, own_imports
from ddplaunch.system.net import port
from ddplaunch.system.process.fork import is_followed, unfollowed
from ddplaunch.system.process.linux import raise_open_files
from ddplaunch.system.words import duration

if TYPE_CHECKING:  # one node needs none of it, or its agent alone
    import socket

    from ddplaunch.launcher.node.job import Connect
    from ddplaunch.launcher.workers.warm import Interpreter
    from ddplaunch.reach.slurm.job import SlurmRequeue
    from ddplaunch.spec.outcome import ClusterEnding


_STACKS_WITHIN = 2.0  # seconds that workers have to write their stacks before they are stopped
_LOOKS = 4  # whether workers move, in --hang-timeout
_AT_REST = 10.0  # seconds from look to look without it, each of which takes 3 ms: a minute's rest is named that exactly
_PTY = ": `srun --pty` gives one to the first node"
# with -c the working directory comes first, where ./importlib would be run; -P, which leaves it out, is of Python 3.11
_HAS_DEBUGPY = """\
import sys
if sys.path[:1] == [""]:
    del sys.path[0]
import importlib.util
sys.exit(importlib.util.find_spec("debugpy") is None)
"""
_DEBUGPY_WITHIN = 30.0  # seconds
_LOOK_WITHIN = 1.0  # seconds


def run(
    spec: JobSpec,
    env: Mapping[str, str],
    allocation: Allocation,
    node: Node,
    *,
    screen: Screen | None = None,
    reports_job: bool | None = None,
    reports_to_caller: bool = False,
    serve: Callable[..., int] | None = None,
    carried: socket.socket | None = None,
) -> int:
    """Be the agent of this node, behind a front of its own, and give the exit status.

    `screen` is what is written to, if that is not our stdout and stderr; `reports_job` is whether this node reports the job
    as a whole, `reports_to_caller` whether it reports to a caller in Python how the job ended, in place of the user. `carried`
    is this agent's connection to the coordinator, where what has started the agent carries it.

    Raises LaunchError: nothing was started.
    """
    has_terminal = False  # the terminal belongs to this node if the screen is our own
    if screen is None:
        screen = Screen.here(env, has_rows=spec.live)
        has_terminal = os.isatty(0) or bool(screen.terminals)
    node = replace(node, has_terminal=has_terminal)
    draft = make_plan(spec, allocation, node, run_id=run_id_of(spec))
    several = allocation.rendezvous is not None and not spec.no_control
    _check_ports(spec, allocation, draft)
    _check_debuggers(spec, env, draft, allocation if several else None)
    check_files(spec)
    signals = passed_on(spec.signals)
    if reports_job is None:
        reports_job = not allocation.has_front and (0 in draft.ranks or not allocation.has_one_screen)
    raise_open_files()
    warm, why_cold = _warm(draft, token.public(env))
    inputs = JobInputs(
        spec=spec,
        env=token.public(env),
        allocation=allocation,
        node=node,
        draft=draft,
        screen=screen,
        error_files=ErrorFiles(draft.run_id, env.get("TMPDIR") or "/tmp"),
        reports_job=reports_job,
        reports_to_caller=reports_to_caller,
        cluster=ClusterQuestions(
            why_ending=_ask_slurm(env, allocation, "why_ending"),
            time_in_queue=_ask_slurm(env, allocation, "time_in_queue"),
        ),
        warm=warm,
        why_cold=why_cold,
    )
    run_agent = partial(begin.run, _agent_job(inputs, env, signals, several=several, carried=carried))
    if serve is None:
        serve = partial(front.run, heartbeat_timeout=spec.heartbeat_timeout)
    try:
        return serve(run_agent, signals, spec.ending_signals, sent_again=allocation.sent_again)
    finally:
        inputs.error_files.remove()  # an agent that was killed has left them


def _agent_job(
    inputs: JobInputs, env: Mapping[str, str], signals: frozenset[int], *, several: bool, carried: socket.socket | None
) -> AgentJob:
    """Return the job as the agent runs it; with `several` nodes, the agent meets the others over the control channel."""
    spec, allocation, draft = inputs.spec, inputs.allocation, inputs.draft
    return AgentJob(
        policy=_policy(spec, draft),
        inputs=inputs,
        link=partial(_link, inputs, env, several=several, carried=carried),
        signals=signals,
        sent_again=allocation.sent_again,
        signals_all=allocation.cluster == "slurm",
        requeue=_requeue(spec, env, draft),
    )


def _policy(spec: JobSpec, draft: Plan) -> Policy:
    """Return what the user decided about the workers of this node."""
    return Policy(
        ranks=draft.ranks,
        stop_signals=spec.ending_signals,
        grace_period=spec.grace_period,
        debug_rank=spec.debug_rank,
        notices=frozenset(spec.requeue_on),
        progress_interval=(spec.hang_timeout or 0.0) / _LOOKS,
        quiet_progress_interval=_AT_REST,
        stacks_timeout=0.0 if spec.program.kind is ProgramKind.COMMAND else _STACKS_WITHIN,
    )


def _check_ports(spec: JobSpec, allocation: Allocation, draft: Plan) -> None:
    """Refuse a port that is taken where rank 0 is to use it, and a host without a loopback interface that works.

    A node that comes back to an elastic job on one machine may find the port taken by that job.

    Raises LaunchError: it is so.
    """
    if draft.master_port and 0 in draft.ranks and not allocation.is_elastic:
        port.reserve(draft.master_port, draft.reasons["master_port"], named=spec.no_control).release()
    if draft.world_size > 1 and draft.master_addr == LOOPBACK:
        port.check_loopback()


def _check_debuggers(spec: JobSpec, env: Mapping[str, str], draft: Plan, among_nodes: Allocation | None) -> None:
    """Refuse a debugger in a worker of this node that lacks what it needs; `among_nodes` are the nodes, if they are several.

    Raises LaunchError: there is no terminal, or no debugpy.
    """
    is_here = spec.debug_rank is None or spec.debug_rank in draft.ranks
    if (asked := spec.wants_terminal) and is_here and not (os.isatty(0) and os.isatty(1)):
        hint = "run it in a terminal"
        if among_nodes is not None:
            hint += f", on each node whose ranks it is for{_PTY if among_nodes.cluster == 'slurm' else ''}"
        raise LaunchError(
            f"{asked.partition(' ')[0]} needs a terminal for its worker, but stdin or stdout is none", hint=hint
        )
    if spec.debugpy_ranks is not None and draft.interpreter is not None:
        check_debugpy(draft.interpreter, token.public(env))


def check_files(spec: JobSpec) -> None:
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
        return ask(partial(os.path.isdir, path), _LOOK_WITHIN)
    except (OSError, AskedEnded):  # of which TimeoutError is one
        return False


def check_debugpy(python: str, env: Mapping[str, str]) -> None:
    """Check that the interpreter of the workers has debugpy. Raises LaunchError: it has none."""
    import shlex  # few jobs need it
    import subprocess

    try:
        with unfollowed():
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


def _warm(draft: Plan, env: Mapping[str, str]) -> tuple[Interpreter | None, str]:
    """Return the interpreter that is kept warm for such runs, and a note: that it is new, or why there is none.

    With a debugger around this command, the note may also be why no fork server is used.
    """
    why_not = draft.reasons.get("warm", "")
    if draft.keep_warm is not None:
        from ddplaunch.launcher.workers import warm  # few jobs keep one

        try:
            place, why = warm.prepare(draft, env)
        except warm.CannotKeep as error:
            why_not = str(error)
        else:
            new = f"the interpreter that was kept warm is not used, and a new one is started: {why}" if why else ""
            if place.is_new and not why:
                new = (
                    f"{', '.join(draft.preload or ()) or 'python'} stays imported when this run has ended, for "
                    f"{duration(place.seconds)} after the last that uses it; `ddplaunch warm --stop` ends it"
                )
            return place, new
    if why_not:
        return None, f"no interpreter is kept warm: {why_not}"
    why_fresh = draft.reasons.get("start", "") if draft.preload is None and is_followed() else ""
    return None, f"workers are fresh processes: {why_fresh}" if why_fresh else ""


def _ask_slurm(
    env: Mapping[str, str], allocation: Allocation, what: Literal["why_ending", "time_in_queue"]
) -> Callable[[], ClusterEnding] | None:
    """Return a function that asks Slurm; None outside of Slurm. The other nodes wait for the answer."""
    if allocation.cluster != "slurm":
        return None

    def ask() -> ClusterEnding:
        from ddplaunch.reach.slurm import job  # only a signal or a restart needs it

        query = job.why_ending if what == "why_ending" else job.time_in_queue
        return query(token.public(env), job.CONTROLLER_TIMEOUT)

    return ask


def _link(inputs: JobInputs, env: Mapping[str, str], *, several: bool, carried: socket.socket | None) -> Connect:
    """Return what connects the agent with the coordinator. If the coordinator is certainly here, listen at once.

    Agents of other nodes then connect and wait. Refused, they would try again and again while this process imports modules.

    Raises LaunchError: this node is unfit, and has told a coordinator elsewhere; or the modules cannot be imported.
    """
    spec, allocation, draft = inputs.spec, inputs.allocation, inputs.draft
    if spec.health_check is not None:
        with own_imports():
            from ddplaunch.launcher.node import health  # few jobs have a check

        health.check(spec.health_check, inputs, env, several=several)
    if not several:
        with own_imports():
            from ddplaunch.launcher.job.local_link import coordinate_alone  # only the agent needs it

        return partial(coordinate_alone, spec, draft)
    listening, rendezvous = None, allocation.rendezvous
    if rendezvous is not None and rendezvous.coordinator:
        with suppress(LaunchError):  # the coordinator tries again, and reports the error
            listening = port.listen(rendezvous.listen, rendezvous.ports)
    with own_imports():
        from ddplaunch.launcher.job import join  # only jobs of several nodes need it

    build = torch_build(spec)
    torch = build.version if build else ""
    return partial(
        join.join, join.prepare(spec, allocation, draft, env, torch=torch, listening=listening, carried=carried)
    )


def _requeue(spec: JobSpec, env: Mapping[str, str], draft: Plan) -> SlurmRequeue | None:
    """Return what queues the job again, if it may be for this process to do: that of rank 0."""
    if not spec.requeue_on or 0 not in draft.ranks:
        return None
    from ddplaunch.reach.slurm.job import SlurmRequeue  # few jobs need it

    return SlurmRequeue(token.public(env), spec.max_requeues, spec.grace_period)
