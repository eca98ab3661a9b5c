"""From a JobSpec to the exit status of the job: find the hosts, then run the job here or start agents elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ddplaunch.launcher.node import front
from ddplaunch.plan.cluster import AllocatedJob, Allocation
from ddplaunch.plan.cluster.checks import ClusterFacts
from ddplaunch.plan.cluster.discover import discover
from ddplaunch.record.folders import BAD_NODES, bad_nodes_file, state_folder
from ddplaunch.spec.job import Given, JobSpec
from ddplaunch.spec.options import token
from ddplaunch.system.console.streams import Screen, Stream, rewraps_lines
from ddplaunch.system.errors import LaunchError, indented, say
from ddplaunch.system.process.files import ask_disk, exists_on_disk

if TYPE_CHECKING:
    from ddplaunch.launcher.node.live import View
    from ddplaunch.record.bad_nodes import Failure

_LONGEST_HOST_FILE = 16 << 20  # characters of a host file, or of a list of hosts that a scheduler has written
# seconds; Slurm's KillWait is 30, a pod's terminationGracePeriodSeconds too, and then no process is left to report how the job
# ended, or to requeue it
_GRACE_WITHIN_OUTER = 25.0
_SIGNS_OF_OUTER_GRACE = ("SLURM_JOB_ID", "SLURM_JOBID", "KUBERNETES_SERVICE_HOST")
_UNAUTHENTICATED = (
    "no token: any process that reaches node 0, or listens where node 0 should, can join, stop or take over the job; "
    "to keep others out, give all nodes the same DDPLAUNCH_TOKEN or --token-file"
)
_NOT_SIGNALLED = (
    "started by {0}, not by Slurm itself: a signal of Slurm may reach {0} alone, and its end kills the workers; "
    "`exec ddplaunch ...` lets them save"
)


def show_plan(spec: JobSpec, env: Mapping[str, str], form: str) -> str:
    """Write the plan as a "table", as "json" or as "sh"; starts nothing.

    Raises LaunchError: the job cannot be run here as asked.
    """
    from ddplaunch.launcher.start import preview  # only this command needs it

    return preview.show(allocate_job(spec, env), form)


def run(
    spec: JobSpec,
    env: Mapping[str, str],
    *,
    control: int | None = None,
    screen: Screen | None = None,
    view: View | None = None,
) -> int:
    """Run the job and give its exit status.

    `control` is a descriptor for reports to the caller of `launch()`: the workers, and how the job ended; None without such a
    caller. `screen` is what is written to, if that is not our stdout and stderr. `view` makes the rows of --live; None: no rows.

    Raises LaunchError: nothing was started.
    """
    _prepare_stdio()
    spec = within_outer_grace(spec, env)  # Slurm or Kubernetes, around this command, kills all after a time of its own
    if spec.live:  # only where there are rows, and a terminal for them
        spec = replace(spec, live=view is not None and Stream.ERR in Screen.here(env).live)
    # forks what serves the job, and is its front: the process that was typed, which owns the terminal and takes the signals
    serve = partial(front.run, output=_output(spec, env, control, view), heartbeat_timeout=spec.heartbeat_timeout)
    reports_to_caller = control is not None
    allocated = allocate_job(spec, env)
    _print_warnings(allocated)
    # not by srun, on this node alone, if workers need our caller or terminal: they have neither in a step
    allocated = _without_needless_srun(allocated, reports_to_caller=reports_to_caller)
    allocation = allocated.allocation
    if allocation.starter == "srun":
        from ddplaunch.launcher.elsewhere.slurm.run_step import run_step  # each way needs what the others do not

        return run_step(allocated, serve=serve)
    if allocation.cluster == "slurm" and spec.requeue_on:
        _warn_if_shell_gets_signals()
    if spec.chaos:
        from ddplaunch.launcher.start import preview  # few jobs want faults

        preview.plan_all_nodes(allocated)  # raises where the job lacks a rank that is to fail
    if allocation.hosts_to_start_on:
        from ddplaunch.launcher.elsewhere.dispatcher import run_over_ssh

        return run_over_ssh(allocated, serve=serve, reports_to_caller=reports_to_caller)
    return _run_here(allocated, screen, serve, reports_to_caller=reports_to_caller)


def _output(spec: JobSpec, env: Mapping[str, str], control: int | None, view: View | None) -> front.FrontOutput:
    """Return where the front writes: to our stdout and stderr, and to `control`; with --live, below the rows of `view`."""
    rewraps = rewraps_lines(env)
    if spec.live and view is not None:
        from ddplaunch.launcher.node.live import LiveOutput  # few jobs need it

        return LiveOutput(view, rewraps=rewraps)
    return front.FrontOutput(control, rewraps=rewraps)


def _without_needless_srun(allocated: AllocatedJob, *, reports_to_caller: bool) -> AllocatedJob:
    """Return a job of this Slurm node alone for this process to run, where a step would not do.

    Workers in a step have neither this process's caller nor its terminal; and a container may be without srun.
    """
    spec, env, allocation = allocated.spec, allocated.env, allocated.allocation
    could_be_here = allocation.starter == "srun" and allocation.is_here
    if not could_be_here or not (reports_to_caller or os.isatty(0) or _lacks_srun(env)):
        return allocated
    from ddplaunch.plan.cluster.slurm import without_step

    return replace(allocated, allocation=without_step(spec, allocation))


def _warn_if_shell_gets_signals() -> None:
    """Warn of a shell between Slurm and this command, which gets the signals on which the job is to be queued again."""
    with suppress(OSError):  # the process that has started this one cannot be seen
        parent = _read(f"/proc/{os.getppid()}/comm").strip()
        if parent not in ("slurmstepd", ""):
            say(_NOT_SIGNALLED.format(parent))


def _remembered_failures(env: Mapping[str, str]) -> tuple[list[Failure], list[str]]:
    """Return the failures of machines that are remembered, and a warning if their file cannot be used.

    Most users have no such file: it is asked for on the disk, which may hang, before what reads it is imported.
    """
    path = bad_nodes_file(env)
    try:
        if not path or not exists_on_disk([path], BAD_NODES):
            return [], []
        from ddplaunch.record import bad_nodes

        return bad_nodes.read(path, time.time()), []
    except LaunchError as error:
        return [], [error.message]


def _warning_of_failed(spec: JobSpec, allocation: Allocation, failures: Sequence[Failure]) -> list[str]:
    """Return a warning of the nodes of this job that have failed lately, if there are any."""
    if not failures or spec.simulate:
        return []
    from ddplaunch.record import bad_nodes

    bad = bad_nodes.among(failures, allocation.hosts or (os.uname().nodename,))
    may_avoid = bool(allocation.hosts_to_start_on) and not spec.avoid_bad_nodes
    return [bad_nodes.warning(bad, time.time(), may_avoid=may_avoid)] if bad else []


def _print_warnings(allocated: AllocatedJob) -> None:
    """Print the warnings of the allocation, unless the job is to be quiet: on one node, or by the command that starts all.

    On all nodes: that the secret is weak, and the doubt whether the variables of the cluster are those of another job.
    """
    spec, allocation = allocated.spec, allocated.allocation
    if spec.verbosity < 0:
        return
    if allocated.agents_meet and allocation.authenticated:
        for weakness in token.weaknesses(spec, allocated.env[token.VARIABLE]):
            say(f"warning: {indented(weakness)}")
    if spec.simulate:  # its hosts are all this machine
        return
    # None: any rank. has_front: a command has started all agents, and prints them itself
    is_first = allocation.node_rank in (0, None) and not allocation.has_front
    doubts = (allocation.doubt,) if allocation.doubt else ()
    for warning in (*doubts, *(allocation.warnings if is_first else ())):
        say(f"warning: {warning}")


def _run_here(
    allocated: AllocatedJob, screen: Screen | None, serve: Callable[..., int], *, reports_to_caller: bool
) -> int:
    """Run this node's part of the job (`serve` forks the agent); if that cannot begin, tell the other nodes."""
    from ddplaunch.launcher.start import node
    from ddplaunch.plan.devices.node import inspect

    try:
        here = inspect(allocated.spec, allocated.public_env)
        return node.run(allocated, here, screen=screen, reports_to_caller=reports_to_caller, serve=serve)
    except LaunchError as error:
        _withdraw(allocated, error)
        raise


def tell_node_0(spec: JobSpec, env: Mapping[str, str], why: LaunchError) -> bool:
    """Tell node 0, if the job has several nodes and this is another one, that this node cannot even be planned.

    Return whether node 0 was reached.
    """
    with suppress(LaunchError):  # then it is not known where node 0 is
        allocated = allocate_job(spec, env)
        if allocated.allocation.starter != "srun" and not allocated.allocation.hosts_to_start_on:
            return _withdraw(allocated, why)
    return False


def _withdraw(allocated: AllocatedJob, why: LaunchError) -> bool:
    if not allocated.agents_meet:
        return False
    from ddplaunch.launcher.job.join import withdraw  # few jobs need it

    return withdraw(allocated.spec, allocated.allocation, allocated.env, why)


def within_outer_grace(spec: JobSpec, env: Mapping[str, str]) -> JobSpec:
    """Have the grace period end before Slurm or Kubernetes, if we run there, kills the agents too; one that was given stays."""
    if spec.origin("grace_period") != "default" or not any(map(env.get, _SIGNS_OF_OUTER_GRACE)):
        return spec
    chosen = Given.chosen("grace_period", f"{_GRACE_WITHIN_OUTER:g}s")
    return replace(spec, grace_period=_GRACE_WITHIN_OUTER, given=(*spec.given, chosen))


def _lacks_srun(env: Mapping[str, str]) -> bool:
    import shutil  # 5 ms, for jobs of Slurm only

    return shutil.which("srun", path=env.get("PATH")) is None


def allocate_job(spec: JobSpec, env: Mapping[str, str]) -> AllocatedJob:
    """Return the job with its hosts, and with the secret by which agents that ddplaunch does not start itself know each other.

    Raises LaunchError: what was asked for contradicts what was found.
    """
    failures, warnings_of_file = _remembered_failures(env)
    avoided = tuple(one.host for one in failures) if spec.avoid_bad_nodes else ()
    facts = ClusterFacts(spec=spec, env=env, hostname=os.uname().nodename, here=_ThisHost(env), avoided=avoided)
    found = discover(facts)
    found = replace(found, warnings=(*found.warnings, *warnings_of_file, *_warning_of_failed(spec, found, failures)))
    is_typed = spec.origin("avoid_bad_nodes").startswith("--")  # not from a file or variable, which are for all jobs
    if is_typed and found.cluster in ("local", "static"):
        found = replace(found, notes=(*found.notes, "--avoid-bad-nodes has no effect: no hosts are listed"))
    allocated = AllocatedJob(spec=spec, env=env, allocation=found)
    if not allocated.agents_meet:
        return allocated
    secret = token.find(spec, env) or _shared_secret(found, env)
    if secret is None:
        found = replace(found, authenticated=False, notes=(*found.notes, _UNAUTHENTICATED))
        return replace(allocated, allocation=found)
    return replace(allocated, env={**env, token.VARIABLE: secret})


def _shared_secret(allocation: Allocation, env: Mapping[str, str]) -> str | None:
    """Return a secret that all agents find in the user's home; None if they have no home, or the job no name, in common."""
    state = state_folder(env)
    if not allocation.identity or state is None:
        return None
    from ddplaunch.launcher.start import shared_token  # few jobs need it

    # task: the cluster starts an agent for each rank
    on_one_host = allocation.task is not None and allocation.task.nnodes == 1
    return ask_disk(
        partial(shared_token.find, state, allocation.identity, on_one_host=on_one_host),
        state,
        "the folder of the secret that the agents share",
        hint=f"give all nodes the same {token.VARIABLE} or --token-file, on a disk that works",
    )


class _ThisHost:
    """This host, as discovery asks it; `env` are the variables of the command."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env

    def read(self, path: str) -> str:
        """Return the text of a file of the user, of a scheduler or of /proc."""
        return _read(path)

    def doubt_about_job(self, nodes: Sequence[str]) -> str:
        """Return why the Slurm job of the variables may not be the one of this process; "" if it surely is."""
        from ddplaunch.launcher.elsewhere.slurm.presence import confirm  # for jobs of Slurm only

        return confirm(token.visible_to_workers(self._env), nodes, os.uname().nodename, _read)


def _read(path: str) -> str:
    from ddplaunch.system.process.files import read_text  # few jobs have a file

    return read_text(path, _LONGEST_HOST_FILE, errors="surrogateescape")


def _prepare_stdio() -> None:
    """Open /dev/null for standard descriptors that are closed, so that no file of ours becomes a worker's stdin or stdout.

    Open /dev/null as stdin as well if this command runs in the background of a shell, to which the input belongs.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor: this one
            os.set_inheritable(fd, True)
    # the kernel stops a program of the shell's session that reads in the background (SIGTTIN); workers, in sessions of their
    # own, would read what is typed for the shell
    is_background = False
    with suppress(OSError):  # it is not our controlling terminal
        is_background = os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp()
    if is_background:
        os.dup2(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), 0)
