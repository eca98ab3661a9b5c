"""Runs a job in a Slurm allocation as one step with an agent on each node: the command of srun, and this command's part."""

from __future__ import annotations

import gc
import os
import signal
import stat
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from ddplaunch.launcher.elsewhere.lead import LeadJob, inputs_of_lead
from ddplaunch.launcher.node import begin, child, front
from ddplaunch.launcher.node.signals import passed_on
from ddplaunch.plan.cluster import AllocatedJob, Allocation, endpoints
from ddplaunch.plan.cluster.slurm import components
from ddplaunch.reach.channel.handshake import key
from ddplaunch.reach.pipes import FrontPipes
from ddplaunch.reach.slurm import srun
from ddplaunch.reach.slurm.job import SlurmQuestions, SlurmRequeue
from ddplaunch.reach.slurm.srun import (
    Grants,
    are_grants_uncertain,
    component_options,
    public_environment,
    query_grants,
    task_options,
)
from ddplaunch.record.run_folder import run_id_with_nodes
from ddplaunch.spec.job import Given, JobSpec
from ddplaunch.spec.options import token as secret
from ddplaunch.spec.options.parsers import write_nnodes
from ddplaunch.spec.options.resolve import sent
from ddplaunch.spec.options.table import Reach
from ddplaunch.spec.order import Order
from ddplaunch.system.console.streams import Screen
from ddplaunch.system.errors import LaunchError, indented, tell
from ddplaunch.system.process.linux import raise_open_files


def run_step(allocated: AllocatedJob, *, serve: Callable[..., int] = front.run) -> int:
    """Start the step, watch the step until its end, and return the exit status of the job.

    `serve` forks the process that watches the step, and is its front: it owns the terminal, and passes signals on.
    """
    spec, env, allocation = allocated.spec, allocated.env, allocated.allocation
    if spec.terminal_option:
        raise _no_terminal(spec, allocation)
    for note in allocation.notes:
        tell(f"ddplaunch: {indented(note)}\n")
    job_id = int(env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID") or 0)
    port = endpoints.ports_of(job_id, os.getpid())[0]  # for this command, of perhaps several in a Slurm job
    token = os.urandom(32).hex()  # by which this command and its agents know each other
    signals = passed_on(spec.signals)
    lead = _lead_job(allocated, signals, token=token, port=port)
    # by node, how many GPUs srun has to ask for; none where it gives the step all of the job without being asked
    gpus = query_grants(allocated.public_env) if are_grants_uncertain(env) else {}
    screen = Screen.here(env, has_rows=spec.live)
    stdin_mode = os.fstat(0).st_mode
    is_stdin_for_job = stat.S_ISREG(stdin_mode) or stat.S_ISFIFO(stdin_mode)  # keyboard input is for the shell
    limits_before = raise_open_files()  # which srun gets: this process alone has many connections
    step = srun.StepJob(
        argv=argv(allocation, sys.executable, components(env), gpus, mpi_type(env)),
        env={
            **environment(env, token=token, host=os.uname().nodename, port=port),
            secret.SCREEN: screen.text,
            **order(spec, allocation).variables(),  # the job, as the agents are to run it
        },
        signals=signals,
        open_files=limits_before,
        read_by_watcher=_read_by_watcher(spec, allocation),
        reads_stdin=allocation.is_here and is_stdin_for_job,  # is_here: this host is the only one of the job
    )
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # what comes from now on is for the front, when that is ready
    watch_step = partial(run, lead, srun.start_step(step))
    # `sent_again`: signals that Slurm sends twice, which is no second request to stop
    return serve(watch_step, signals, spec.ending_signals, sent_again=allocation.sent_again)


def _read_by_watcher(spec: JobSpec, allocation: Allocation) -> tuple[int, ...]:
    """Return which streams of srun the watcher reads: its stderr, where it says which tasks have ended, if there are several."""
    if spec.live:
        return (1, 2)
    return (2,) if len(allocation.hosts_to_start_on) > 1 else ()


def _lead_job(allocated: AllocatedJob, signals: frozenset[int], *, token: str, port: int) -> LeadJob:
    """Return what this command needs to coordinate the agents of the step, which connect to `port` and prove `token`."""
    spec, env = allocated.spec, allocated.public_env
    run_id = run_id_with_nodes(spec, env)
    # agents of the step make the same name, by `endpoints.job_name`; its first field, for Slurm's id, is empty for them too
    name_of_job = "\0".join(("", spec.rdzv_id or "", str(port)))
    return LeadJob(
        inputs=inputs_of_lead(allocated, run_id=run_id, python=sys.executable, cluster=SlurmQuestions(env)),
        key=key(token, name_of_job),
        ports=tuple(candidate for candidate in endpoints.ports_from(port) if candidate != spec.master_port),
        python=sys.executable,
        signals=signals,
        sent_again=allocated.allocation.sent_again,  # signals that Slurm sends twice
        cluster_signals_all=True,  # Slurm may signal each process of a job itself
        requeue=SlurmRequeue(env, spec.max_requeues) if spec.requeue_on else None,
    )


def _no_terminal(spec: JobSpec, allocation: Allocation) -> LaunchError:
    """Return the error for a job that wants a terminal; its hint is `srun --pty`, which gives the first node one.

    That node has ranks 0 to --nproc-per-node - 1; without a number, only of rank 0 it is certain.
    """
    asked, nodes = spec.terminal_option, len(allocation.hosts_to_start_on)
    each, rank = spec.nproc_per_node, spec.debug_rank  # None: no rank is named, as with --debug-on-error
    is_on_first = rank == 0 or (rank is not None and isinstance(each, int) and rank < each)
    pty = "srun --pty --ntasks-per-node=1"
    if nodes == 1 or is_on_first:
        hint = f"start it yourself: `{pty} --nodes={nodes} ddplaunch {asked} ...` gives the first node yours"
    elif rank is not None:
        hint = (
            f"`srun --pty` gives your terminal to the first node alone: with `--debugpy {rank}` that rank waits for an editor "
            "to connect, wherever it runs"
        )
    else:
        hint = f"`srun --pty` gives your terminal to the first node alone: `{pty} --nodes=1 ddplaunch --nnodes 1 {asked} ...`"
    return LaunchError(f"{asked}: the step that ddplaunch would start has no terminal", hint=hint)


def order(spec: JobSpec, allocation: Allocation) -> Order:
    """Return the order for the agents of the step."""
    given, (least, most) = sent(spec, Reach.STEP), allocation.nnodes
    if least < most:
        given.append(Given.typed("nnodes", write_nnodes((least, most - spec.spares))))
    return Order.of(given, spec)


def argv(
    allocation: Allocation,
    python: str,
    components: Sequence[Collection[str]] = (),
    gpus: Grants = MappingProxyType({}),
    mpi: str = "none",
) -> tuple[str, ...]:
    """Return the command that starts an agent on each node.

    `gpus` are the numbers of GPUs that each node was granted, where srun has to be told. In a heterogeneous job, each of the
    `components` (the nodes of each) has srun options of its own. `mpi` is what srun is to prepare for MPI: its --mpi.

    srun binds and labels nothing: agents know their devices, and write the ranks before the lines themselves. A bad exit of one
    kills none of the others: they end together by themselves, and srun would SIGKILL workers that are saving. The step waits
    for no other of the job (--overlap), unless nodes have different numbers of GPUs, which srun grants only without that.
    """
    hosts = [host.address for host in allocation.hosts_to_start_on]
    agent = (python, "-P", "-m", "ddplaunch.launcher.start.task")
    # an agent on this host is handed our stdin, see `reach/slurm/srun.py`; on others no worker reads
    no_input = "--input=none"
    # output of one node comes as it is written; of several, Slurm has to keep each line until it ends, or lines would be torn
    unbuffered = ("--unbuffered",) if len(hosts) == 1 and not components else ()
    outlives_nodes = ("--no-kill",) if allocation.is_elastic else ()

    def on(nodes: Sequence[str]) -> list[str]:
        return [*task_options(nodes, gpus, mpi), no_input, *unbuffered, *outlives_nodes, *agent]

    if not components:
        return ("srun", *on(hosts))
    parts: list[str] = []
    for number, component in enumerate(components):
        if chosen := [host for host in hosts if host in component]:
            parts += (":" if parts else "srun", *component_options(number), *on(chosen))
    return tuple(parts)


def mpi_type(env: Mapping[str, str]) -> str:
    """Return what srun is to prepare for MPI: what SLURM_MPI_TYPE says in a batch script, else nothing, whatever the site does.

    Agents are no processes of MPI, and their workers share the task of the agent. A task that has submitted or started this
    script has SLURM_MPI_TYPE too: that was for itself.
    """
    return "none" if "SLURM_STEP_ID" in env else env.get("SLURM_MPI_TYPE") or "none"


def environment(env: Mapping[str, str], *, token: str, host: str, port: int) -> dict[str, str]:
    """Return the variables of a step of agents, which find the coordinator at this host and port."""
    kept = public_environment(env)
    if tasks := env.get("SLURM_NTASKS_PER_NODE"):
        kept[secret.TASKS_PER_NODE] = tasks
    return {**kept, secret.VARIABLE: token, secret.RDZV_HOST: host, secret.RDZV_PORT: str(port)}


def run(lead: LeadJob, step: srun.Srun, pipes: FrontPipes) -> int:
    """Coordinate the agents of the step and give the job's exit status. Runs in a process of its own, with signals blocked."""
    child.decide_start(pipes)  # srun runs, so the job has begun: the front no longer may just kill this process
    files = begin.start_writer()  # leads to a process that writes the run folder
    # meanwhile srun starts the agents, which takes about as long
    from ddplaunch.launcher.elsewhere.slurm.watcher import Watcher
    from ddplaunch.system.loop.loop import Loop

    gc.freeze()  # what is imported is no garbage; collecting was off until now, for a quick start
    gc.enable()
    return Watcher(Loop(), lead, step, files, pipes).run()


# --- how many GPUs each node was granted, and how srun is asked for them
#
# A step inherits what a job has for each node (`--gpus-per-node`, `--gres`), but is given less or nothing of `--gpus`,
# `--gpus-per-task` and what comes with `--exclusive` (Slurm 22.05). So the GPUs of each node are asked for by number.
