"""How a job in a Slurm allocation becomes one step of it with an agent on each node. Starts nothing itself."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from ddplaunch import exitcodes
from ddplaunch.agent import front
from ddplaunch.agent.pipes import FrontPipes
from ddplaunch.agent.signals import passed_on
from ddplaunch.cluster import Allocation, endpoints, hostlist
from ddplaunch.cluster.slurm import components
from ddplaunch.errors import below, visible
from ddplaunch.options import token as secret
from ddplaunch.options.argv import to_argv
from ddplaunch.process.linux import raise_open_files
from ddplaunch.process.start import StartError
from ddplaunch.slurm import srun
from ddplaunch.slurm.quoting import escaped
from ddplaunch.slurm.requeue import SlurmRequeue
from ddplaunch.spec import JobSpec

# options of sbatch and salloc that srun would take from the environment, though they are not meant for a step of agents
_NOT_FOR_THE_STEP = (
    "SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_VERBOSE", "SLURM_CPUS_PER_GPU",
    "SLURM_CPUS_PER_TASK", "SLURM_DISTRIBUTION", "SLURM_EXACT", "SLURM_EXCLUSIVE", "SLURM_EXIT_ERROR",
    "SLURM_EXIT_IMMEDIATE", "SLURM_GPU_BIND", "SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_KILL_BAD_EXIT",
    "SLURM_LABELIO", "SLURM_MEM_BIND", "SLURM_MULTI_PROG",
    "SLURM_NPROCS", "SLURM_NTASKS", "SLURM_NTASKS_PER_CORE", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_NODE",
    "SLURM_NTASKS_PER_SOCKET", "SLURM_STDINMODE", "SLURM_TASKS_PER_NODE", "SLURM_TRES_PER_TASK", "SLURM_UNBUFFEREDIO",
    "SLURM_WAIT", "SRUN_CPUS_PER_TASK",
)  # fmt: skip
# the suffix of a variable of one component of a heterogeneous job; PACK until Slurm 20.02
_OF_COMPONENT = re.compile(r"_(HET|PACK)_GROUP_\d+$")
# what the agents find by themselves, or get in another way
_NOT_SENT = frozenset((
    "cluster", "env", "include", "exclude", "nnodes", "node_rank", "local_addr", "rdzv_backend", "rdzv_endpoint",
    "standalone", "token_file",
))  # fmt: skip


def run_step(spec: JobSpec, env: Mapping[str, str], allocation: Allocation) -> int:
    """Start the step, watch it, and give the exit status of the job.

    Raises:
        LaunchError: nothing was started.
    """
    for note in allocation.notes:
        sys.stderr.write(visible(f"ddplaunch: {below(note)}\n"))
    job_id = int(env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID") or 0)
    port = endpoints.ports_of(job_id, os.getpid())[0]
    token = os.urandom(32).hex()
    signals = passed_on(spec.signals)
    job = srun.StepJob(
        argv=argv(spec, allocation, sys.executable, components(env)),
        env={**environment(env, token=token, port=port), **secret.hidden(spec)},
        host=allocation.start[0].address,
        ports=endpoints.ports_from(port),
        token=token,
        name="\0".join(("", spec.rdzv_id or "", str(port))),
        signals=signals,
        stops=spec.ending_signals,
        sent_again=allocation.sent_again,
        heartbeat_timeout=spec.heartbeat_timeout,
        grace_period=spec.grace_period,
        open_files=raise_open_files(),
        notices=frozenset(spec.requeue_on),
        requeue=SlurmRequeue(secret.public(env), spec.max_requeues),
        is_quiet=spec.verbosity < 0,
    )
    return front.run(
        partial(run, job), signals, spec.ending_signals, sent_again=allocation.sent_again, meanwhile=lambda: None
    )


def argv(
    spec: JobSpec, allocation: Allocation, python: str, components: Sequence[Collection[str]] = ()
) -> tuple[str, ...]:
    """Give the command that starts an agent on each node.

    srun binds and labels nothing: agents know their devices, and write the ranks before the lines themselves. A bad exit of
    one kills none of the others: they end together by themselves, and srun would SIGKILL workers that are saving. The step
    waits for no other of the job. In a heterogeneous job, each of the `components` has srun options of its own.
    """
    hosts = [host.address for host in allocation.start]
    command = (python, "-P", "-m", "ddplaunch.launcher.task", *escaped(to_argv(spec, without=_NOT_SENT)))
    if not components:
        return ("srun", *_on(hosts), *command)
    words: list[str] = []
    for number, component in enumerate(components):
        if chosen := [host for host in hosts if host in component]:
            words += (":" if words else "srun", f"--het-group={number}", *_on(chosen), *command)
    return tuple(words)


def _on(hosts: Sequence[str]) -> tuple[str, ...]:
    """The options of srun for one agent on each of these nodes."""
    return (
        "--quiet",
        f"--nodes={len(hosts)}",
        f"--ntasks={len(hosts)}",
        "--ntasks-per-node=1",
        "--overlap",
        f"--nodelist={hostlist.compress(hosts)}",
        "--cpu-bind=none",
        "--gpu-bind=none",
        "--mem-bind=none",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--input=none",
        "--export=ALL",
    )


def environment(env: Mapping[str, str], *, token: str, port: int) -> dict[str, str]:
    """Give the variables of the step."""
    public = secret.public(env)
    kept = {name: value for name, value in public.items() if _OF_COMPONENT.sub("", name) not in _NOT_FOR_THE_STEP}
    if tasks := env.get("SLURM_NTASKS_PER_NODE"):
        kept[secret.TASKS_PER_NODE] = tasks
    # --gpus is a number for all nodes of the job, which a step would request again and, in some versions, not get
    for name in env:
        part = name.removeprefix("SLURM_GPUS")
        if part != name and (not part or _OF_COMPONENT.fullmatch(part)) and (each := _gpus_on_node(env, part)):
            kept[f"SLURM_GPUS_PER_NODE{part}"] = each
    return {**kept, secret.VARIABLE: token, secret.RDZV_PORT: str(port)}


def _gpus_on_node(env: Mapping[str, str], component: str) -> str | None:
    """How many GPUs of a job with --gpus, or of a component of it, are on each of its nodes.

    The shell of salloc, which is on none, can only divide; a batch script knows about the nodes of its own component.
    """
    if not component and (here := env.get("SLURM_GPUS_ON_NODE")):
        return here
    kind, colon, number = env[f"SLURM_GPUS{component}"].rpartition(":")
    nodes = env.get(f"SLURM_JOB_NUM_NODES{component}", "")
    if number.isdecimal() and nodes.isdecimal() and int(nodes) and int(number) % int(nodes) == 0:
        return f"{kind}{colon}{int(number) // int(nodes)}"
    return None


def run(job: srun.StepJob, pipes: FrontPipes) -> int:
    """Run the step and give the job's exit status. Runs in a process of its own, in which signals are still blocked."""
    child = srun.start_step(job)
    from ddplaunch.slurm.watcher import Watcher  # takes about as long as srun does to start the agents

    gc.freeze()
    gc.enable()
    watcher = Watcher(job, pipes)
    if isinstance(child, StartError):
        return watcher.fail(child, exitcodes.NOT_EXECUTABLE)
    return watcher.run(child)
