"""What any step of agents has: the options of srun, and the variables. Starts nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

from ddplaunch.plan.cluster import hostlist
from ddplaunch.reach.slurm.job import ANSWER_TIMEOUT, job_id
from ddplaunch.reach.slurm.scontrol import JobRecord, ScontrolError, show_jobs
from ddplaunch.spec.options import token as secret
from ddplaunch.system.errors import LaunchError

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


def task_options(nodes: Sequence[str], gpus: Grants = MappingProxyType({}), mpi: str = "none") -> list[str]:
    """Return the options of srun for one task on each of these nodes, with all its CPUs and GPUs; `mpi` as in `mpi_type`."""
    number = len(nodes)
    return [
        *("--quiet", f"--nodes={number}", f"--ntasks={number}", "--ntasks-per-node=1"),
        *(*gpu_options(nodes, gpus), f"--nodelist={hostlist.compress(nodes)}", "--cpu-bind=none", "--gpu-bind=none"),
        *("--mem-bind=none", "--kill-on-bad-exit=0", "--wait=0", f"--mpi={mpi}", "--export=ALL"),
    ]


def component_options(number: int | None) -> list[str]:
    """Return the options of srun for nodes of this component of a heterogeneous job; None: the job is none."""
    return [] if number is None else [f"--het-group={number}"]


def public_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of any step: none that srun takes for its options, and no secret."""
    return {
        name: value
        for name, value in secret.public(env).items()
        if not _OF_SLURM.match(name) or _FOR_THE_STEP.fullmatch(_OF_COMPONENT.sub("", name))
    }


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
