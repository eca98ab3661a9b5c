"""How a job in a Slurm allocation becomes one step of it with an agent on each node. Starts nothing itself."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import stat
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType

from ddplaunch.agent import child, front
from ddplaunch.agent.pipes import FrontPipes
from ddplaunch.agent.signals import passed_on
from ddplaunch.cluster import Allocation, endpoints, hostlist
from ddplaunch.cluster.slurm import components
from ddplaunch.errors import LaunchError, below, tell
from ddplaunch.options import token as secret
from ddplaunch.options.parsers import write_nnodes
from ddplaunch.options.resolve import sent
from ddplaunch.options.table import Reach
from ddplaunch.output.streams import Screen
from ddplaunch.process.linux import raise_open_files
from ddplaunch.redaction import Redactor
from ddplaunch.slurm import srun
from ddplaunch.slurm.job import ANSWER_TIMEOUT, SlurmRequeue, job_id
from ddplaunch.slurm.scontrol import JobRecord, ScontrolError, show_jobs
from ddplaunch.slurm.srun import escaped
from ddplaunch.spec import Given, JobSpec, Source

# Of the variables that srun reads, or that describe a job, those that a step of agents gets: what names the job, its nodes and
# what it was granted. All others of Slurm's are options, of the script, of a task in which it was submitted or of the user:
# SLURM_NTASKS, SLURM_STDOUTMODE, SLURM_DEBUG, SRUN_EXPORT_ENV. The tasks are given theirs by Slurm.
_FOR_THE_STEP = re.compile(
    r"SLURM_(JOB_.*|JOBID|ARRAY_.*|HET_.*|PACK_.*|NODELIST|NNODES|CONF|CONF_SERVER|CLUSTER_NAME|WORKING_CLUSTER|SUBMIT_.*"
    r"|RESTART_COUNT|MEM_PER_.*|GPUS_PER_NODE|GRES|HINT|NETWORK|THREADS_PER_CORE|CPU_FREQ_REQ|SPANK_.*|TASK_PROLOG|TASK_EPILOG)"
)
_OF_SLURM = re.compile(r"(SLURM|SRUN|SLURMD)_")
# the suffix of a variable of one component of a heterogeneous job; PACK until Slurm 20.02
_OF_COMPONENT = re.compile(r"_(HET|PACK)_GROUP_\d+$")

Grants = Mapping[str, Counter[str]]  # by node: how many GPUs of each type, "" for those without one

_GPUS = re.compile(r"\bgpu:(?:([^:(,]+):)?(\d+)(?=[(,]|$)")
# of a job with GPUs; the last one is set for a batch script alone
_GPU_SIGNS = ("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET", "SLURM_NTASKS_PER_GPU", "SLURM_JOB_GPUS")


def run_step(
    spec: JobSpec, env: Mapping[str, str], allocation: Allocation, *, serve: Callable[..., int] = front.run
) -> int:
    """Start the step, watch the step until its end, and return the exit status of the job; `serve` is that of `node.run`."""
    if spec.wants_terminal:
        raise _no_terminal(spec, allocation)
    for note in allocation.notes:
        tell(f"ddplaunch: {below(note)}\n")
    job_id = int(env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID") or 0)
    port = endpoints.ports_of(job_id, os.getpid())[0]
    token = os.urandom(32).hex()
    signals = passed_on(spec.signals)
    mode = os.fstat(0).st_mode  # keyboard input is for the shell
    gpus = query_grants(secret.public(env)) if are_grants_uncertain(env) else {}
    screen = Screen.here(env, has_rows=spec.live)
    job = srun.StepJob(
        argv=argv(spec, allocation, sys.executable, components(env), gpus, mpi_type(env)),
        env={
            **environment(env, token=token, port=port),
            secret.SCREEN: screen.text,
            **apart(spec),
            **secret.hidden(spec),
        },
        host=allocation.start[0].address,
        ports=endpoints.ports_from(port),
        token=token,
        name="\0".join(("", spec.rdzv_id or "", str(port))),
        signals=signals,
        stops=spec.ending_signals,
        sent_again=allocation.sent_again,
        heartbeat_timeout=spec.heartbeat_timeout,
        may_shorten_silence=spec.may_shorten_silence,
        grace_period=spec.grace_period,
        open_files=raise_open_files(),
        notices=frozenset(spec.requeue_on),
        requeue=SlurmRequeue(secret.public(env), spec.max_requeues, spec.grace_period),
        is_quiet=spec.verbosity < 0,
        live=spec.live,
        reads_stdin=allocation.is_here and (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)),
    )
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # what comes from now on is for the front, when that is ready
    return serve(
        partial(run, job, srun.start_step(job)), signals, spec.ending_signals, sent_again=allocation.sent_again
    )


def _no_terminal(spec: JobSpec, allocation: Allocation) -> LaunchError:
    """Return the error for a job that wants a terminal; its hint is `srun --pty`, which gives the first node one."""
    asked, nodes = spec.wants_terminal, len(allocation.start)
    each, rank = spec.nproc_per_node, spec.debug_rank
    on_first = rank == 0 or (rank is not None and isinstance(each, int) and rank < each)
    pty = "srun --pty --ntasks-per-node=1"
    if nodes == 1 or on_first:
        hint = f"start it yourself: `{pty} --nodes={nodes} ddplaunch {asked} ...` gives the first node yours"
    elif rank is not None:
        hint = (
            f"`srun --pty` gives your terminal to the first node alone: with `--debugpy {rank}` that rank waits for an editor "
            "to connect, wherever it runs"
        )
    else:
        hint = f"`srun --pty` gives your terminal to the first node alone: `{pty} --nodes=1 ddplaunch --nnodes 1 {asked} ...`"
    return LaunchError(f"{asked}: the step that ddplaunch would start has no terminal", hint=hint)


def argv(
    spec: JobSpec,
    allocation: Allocation,
    python: str,
    components: Sequence[Collection[str]] = (),
    gpus: Grants = MappingProxyType({}),
    mpi: str = "none",
) -> tuple[str, ...]:
    """Return the command that starts an agent on each node.

    srun binds and labels nothing: agents know their devices, and write the ranks before the lines themselves. It reads nothing
    either: an agent on this host is handed our stdin, see `slurm/stdin.py`; on others no worker reads. A bad exit of
    one kills none of the others: they end together by themselves, and srun would SIGKILL workers that are saving. The step
    waits for no other of the job, unless its nodes have different numbers of GPUs: `gpus` are those of each node. In a
    heterogeneous job, each of the `components` has srun options of its own.
    """
    hosts = [host.address for host in allocation.start]
    is_range = allocation.nnodes[0] < allocation.nnodes[1]
    given = [one for one in sent(spec, Reach.STEP) if not _is_apart(one)]
    if is_range:
        least, most = allocation.nnodes
        given.append(Given.typed("nnodes", write_nnodes((least, most - spec.spares))))
    words = (*(json.dumps(one.fields()) for one in given), "--", spec.program.target, *spec.program.args)
    agent = (python, "-P", "-m", "ddplaunch.launcher.task", *escaped(words))
    # else Slurm keeps back a line until it ends; what several nodes write at once would then be torn
    at_once = ("--unbuffered",) if len(hosts) == 1 and not components else ()
    outlives_nodes = ("--no-kill",) if is_range else ()

    def on(nodes: Sequence[str], *of_component: str) -> list[str]:
        return [*of_component, *task_options(nodes, gpus, mpi), "--input=none", *at_once, *outlives_nodes, *agent]

    if not components:
        return ("srun", *on(hosts))
    parts: list[str] = []
    for number, component in enumerate(components):
        if chosen := [host for host in hosts if host in component]:
            parts += (":" if parts else "srun", *on(chosen, f"--het-group={number}"))
    return tuple(parts)


def apart(spec: JobSpec) -> dict[str, str]:
    """Return the variable by which the agents get the options that are not among their arguments; none if all are."""
    fields = [one.fields() for one in sent(spec, Reach.STEP) if _is_apart(one)]
    return {secret.OPTIONS: json.dumps(fields)} if fields else {}


def _is_apart(given: Given) -> bool:
    """Whether an option goes to the agents by a variable: it holds a secret, and was typed on no command line."""
    if given.source is Source.COMMAND_LINE:
        return False
    redactor = Redactor()
    redactor.text(str(given))
    return redactor.hidden > 0


def task_options(nodes: Sequence[str], gpus: Grants = MappingProxyType({}), mpi: str = "none") -> list[str]:
    """Return the options of srun for one task on each of these nodes, with all its CPUs and GPUs; `mpi` as in `mpi_type`."""
    number = len(nodes)
    return [
        *("--quiet", f"--nodes={number}", f"--ntasks={number}", "--ntasks-per-node=1"),
        *(*gpu_options(nodes, gpus), f"--nodelist={hostlist.compress(nodes)}", "--cpu-bind=none", "--gpu-bind=none"),
        *("--mem-bind=none", "--kill-on-bad-exit=0", "--wait=0", f"--mpi={mpi}", "--export=ALL"),
    ]


def mpi_type(env: Mapping[str, str]) -> str:
    """Return what srun is to prepare for MPI: what SLURM_MPI_TYPE says in a batch script, else nothing, whatever the site does.

    Agents are no processes of MPI, and their workers share the task of the agent. A task that has submitted or started this
    script has SLURM_MPI_TYPE too: that was for itself.
    """
    return "none" if "SLURM_STEP_ID" in env else env.get("SLURM_MPI_TYPE") or "none"


def environment(env: Mapping[str, str], *, token: str, port: int) -> dict[str, str]:
    """Return the variables of a step of agents."""
    kept = public_environment(env)
    if tasks := env.get("SLURM_NTASKS_PER_NODE"):
        kept[secret.TASKS_PER_NODE] = tasks
    return {**kept, secret.VARIABLE: token, secret.RDZV_PORT: str(port)}


def public_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of any step: none that srun takes for its options, and no secret."""
    return {
        name: value
        for name, value in secret.public(env).items()
        if not _OF_SLURM.match(name) or _FOR_THE_STEP.fullmatch(_OF_COMPONENT.sub("", name))
    }


def run(job: srun.StepJob, started: srun.Srun, pipes: FrontPipes) -> int:
    """Watch the step and give the job's exit status. Runs in a process of its own, in which signals are still blocked."""
    child.decide_start(pipes)  # srun has been started: from here on there is something to be stopped
    from ddplaunch.loop.loop import Loop
    from ddplaunch.slurm.watcher import Watcher  # takes about as long as srun does to start the agents

    gc.freeze()
    gc.enable()
    return Watcher(Loop(), job, pipes).run(started)


# --- how many GPUs each node was granted, and how srun is asked for them
#
# A step inherits what a job has for each node (`--gpus-per-node`, `--gres`), but is given less or nothing of `--gpus`,
# `--gpus-per-task` and what comes with `--exclusive` (Slurm 22.05). So the GPUs of each node are asked for by number.


def are_grants_uncertain(env: Mapping[str, str]) -> bool:
    """Whether a step of this job may not be given all its GPUs unless it asks for them."""
    names = {_OF_COMPONENT.sub("", name) for name in env}
    return "SLURM_GPUS_PER_NODE" not in names and not names.isdisjoint(_GPU_SIGNS)


def query_grants(env: Mapping[str, str]) -> Grants:
    """Query slurmctld about the GPUs of this job; what cannot be learned is left to what srun gives by itself."""
    with suppress(ScontrolError, LaunchError):
        return grants_of(show_jobs(env, job_id(env), ANSWER_TIMEOUT, details=True))
    return {}


def grants_of(jobs: Sequence[JobRecord]) -> Grants:
    """Return the GPUs of each node, from the records of a job with their details; LaunchError if a list of nodes is malformed."""
    found: dict[str, Counter[str]] = {}
    for nodes, gres in (grant for job in jobs for grant in job.grants):
        for node in hostlist.expand(nodes, "Nodes"):
            each = found.setdefault(node, Counter())
            for kind, number in _GPUS.findall(gres):
                each[kind] += int(number)
    return found


def gpu_options(hosts: Sequence[str], grants: Grants) -> tuple[str, ...]:
    """Return the options of srun for the GPUs of these nodes, and whether the step may overlap with others.

    A number for all nodes is met by what each of them has, but not in a step that overlaps: it counts no GPU as its own.
    """
    each = [grants.get(host, Counter[str]()) for host in hosts]
    if not any(each):
        return ("--overlap",)
    are_equal = all(one == each[0] for one in each)
    counted = sorted((each[0] if are_equal else sum(each, Counter[str]())).items())
    gpus = ",".join(f"{kind}:{number}" if kind else f"{number}" for kind, number in counted)
    return ("--overlap", f"--gpus-per-node={gpus}") if are_equal else (f"--gpus={gpus}",)
