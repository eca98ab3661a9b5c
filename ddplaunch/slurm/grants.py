"""How many GPUs each node of the job was granted, and how srun is asked for them. Runs `scontrol`; all but `query` is pure.

A step inherits what a job has for each node (`--gpus-per-node`, `--gres`), but is given less or nothing of `--gpus`,
`--gpus-per-task` and what comes with `--exclusive` (Slurm 22.05). So the GPUs of each node are asked for by number.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from ddplaunch.cluster import hostlist
from ddplaunch.errors import LaunchError
from ddplaunch.slurm.job import ANSWER_TIMEOUT, job_id
from ddplaunch.slurm.scontrol import ScontrolError, scontrol

Grants = Mapping[str, Counter[str]]  # by node: how many GPUs of each type, "" for those without one

_OF_NODES = re.compile(r"\bNodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
_GPUS = re.compile(r"\bgpu:(?:([^:(,]+):)?(\d+)(?=[(,]|$)")
# of a job with GPUs; the last one is set for a batch script alone
_SIGNS = ("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET", "SLURM_NTASKS_PER_GPU", "SLURM_JOB_GPUS")


def are_uncertain(env: Mapping[str, str]) -> bool:
    """Whether a step of this job may not be given all its GPUs unless it asks for them."""
    names = {re.sub(r"_(HET|PACK)_GROUP_\d+$", "", name) for name in env}
    return "SLURM_GPUS_PER_NODE" not in names and not names.isdisjoint(_SIGNS)


def query(env: Mapping[str, str]) -> Grants:
    """Query slurmctld about the GPUs of this job; what cannot be learned is left to what srun gives by itself."""
    try:
        return parse(scontrol(env, ("show", "job", "-d", "-o", job_id(env)), ANSWER_TIMEOUT))
    except (ScontrolError, LaunchError):
        return {}


def parse(output: str) -> Grants:
    """Return the GPUs of each node, from the output of `scontrol show job -d -o`.

    Raises:
        LaunchError: a list of nodes is malformed.
    """
    found: dict[str, Counter[str]] = {}
    for nodes, gres in _OF_NODES.findall(output):
        for node in hostlist.expand(nodes, "Nodes"):
            each = found.setdefault(node, Counter())
            for kind, number in _GPUS.findall(gres):
                each[kind] += int(number)
    return found


def options(hosts: Sequence[str], grants: Grants) -> tuple[str, ...]:
    """Return the options of srun for the GPUs of these nodes, and whether the step may overlap with others.

    A number for all nodes is met by what each of them has, but not in a step that overlaps: it counts no GPU as its own.
    """
    each = [grants.get(host, Counter[str]()) for host in hosts]
    if not any(each):
        return ("--overlap",)
    if all(one == each[0] for one in each):
        return ("--overlap", f"--gpus-per-node={_written(each[0])}")
    return (f"--gpus={_written(sum(each, Counter[str]()))}",)


def _written(gpus: Counter[str]) -> str:
    return ",".join(f"{kind}:{number}" if kind else f"{number}" for kind, number in sorted(gpus.items()))
