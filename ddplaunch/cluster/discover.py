"""Tries each kind of cluster in turn; the first that recognises its variables wins. Pure but for `read`, which reads files.

Flags come before what is found. Inside a worker only flags count: the variables there describe the job that the worker is
part of, and a job started by it is another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from ddplaunch.cluster import Allocation, checks, local
from ddplaunch.cluster.facts import ClusterFacts
from ddplaunch.errors import LaunchError
from ddplaunch.spec import JobSpec

Recogniser = Callable[[ClusterFacts], Allocation | None]

# in the order in which they are tried; a cluster without any of its variables is not even imported
_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "slurm": ("SLURM_JOB_ID", "SLURM_JOBID"),
    "kubernetes": ("JOB_COMPLETION_INDEX", "RANK"),
    "mpi": (
        "OMPI_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_RANK",
        "FLUX_TASK_RANK",
        "JSM_NAMESPACE_RANK",
        "PALS_RANKID",
        "PMI_RANK",
    ),
    "pbs": ("PBS_NODEFILE",),
    "lsf": ("LSB_JOBID",),
}


def discover(spec: JobSpec, env: Mapping[str, str], hostname: str, *, read: Callable[[str], str]) -> Allocation:
    """Return the hosts of the job and our place among them; `read` gives the text of a file or raises OSError.

    Raises:
        LaunchError: what was asked contradicts what was found, or is not enough.
    """
    facts = ClusterFacts(spec=spec, env=env, hostname=hostname, read=read)
    found = _find(facts)
    checks.workers_of_one_node(spec, found.nnodes[1])
    return _without_control(spec, found) if spec.no_control else found


def _find(facts: ClusterFacts) -> Allocation:
    spec = facts.spec
    if spec.simulate:
        return local.simulated(spec)
    if spec.standalone or spec.cluster == "local":
        return local.discover(spec, facts.hostname)
    if spec.cluster:
        return _forced(facts, spec.cluster)
    for name in _candidates(facts):
        recognise, _ = _recogniser(name)
        if found := recognise(facts):
            return found
    found = local.discover(spec, facts.hostname)
    return replace(found, notes=(*found.notes, *_unused_index(facts)))


def _candidates(facts: ClusterFacts) -> list[str]:
    """The clusters to try, in their order."""
    names = ["ssh"] if facts.spec.hosts or facts.spec.hostfile else []
    if checks.several(facts.spec):
        names.append("static")
    if facts.value("TORCHELASTIC_RUN_ID"):  # set for each worker by ddplaunch and by torchrun
        return names
    found = [name for name, variables in _VARIABLES.items() if facts.value(*variables)]
    if {"slurm", "mpi"} <= set(found):
        from ddplaunch.cluster import mpi

        if mpi.started_inside_slurm(facts):
            found.remove("slurm")
    return names + found


def _forced(facts: ClusterFacts, name: str) -> Allocation:
    recognise, needs = _recogniser(name)
    found = recognise(facts)
    if found is None:
        by_flags = name in ("ssh", "static")
        missing = f"it needs {needs}" if by_flags else f"not inside a job of this kind, which sets {needs}"
        hint = "leave --cluster out to see what is found"
        raise LaunchError(f"{facts.spec.asked('cluster', name)}: {missing}", hint=hint)
    return found


def _recogniser(name: str) -> tuple[Recogniser, str]:
    """Return the function that recognises this kind of cluster, and by what: each kind is the module of that name."""
    from importlib import import_module  # most jobs are in no cluster

    kind = import_module(f"ddplaunch.cluster.{name}")
    return kind.discover, kind.NEEDS


def _unused_index(facts: ClusterFacts) -> list[str]:
    index = facts.value("JOB_COMPLETION_INDEX")
    if index is None or checks.nnodes_asked(facts.spec) or facts.value("TORCHELASTIC_RUN_ID"):
        return []
    return [f"JOB_COMPLETION_INDEX={index} is ignored, since --nnodes is not given: this pod is a job of its own"]


def _without_control(spec: JobSpec, found: Allocation) -> Allocation:
    """The allocation without a control channel: all that the nodes would agree on has to be known before.

    Raises:
        LaunchError: it is not.
    """
    asked = spec.origin("no_control")
    if found.start:
        raise LaunchError(
            f"{asked}: agents that ddplaunch starts on other hosts need a control channel to this one",
            hint="leave --no-control out",
        )
    if found.rendezvous is None:
        return found
    if found.node_rank is None:
        raise LaunchError(
            f"{asked}: no coordinator assigns this node its rank", hint="add --node-rank and --master-addr"
        )
    if found.nnodes[0] != found.nnodes[1]:
        raise LaunchError(f"{asked}: without a control channel nodes cannot agree on their number", hint="--nnodes N")
    # every node computes the same
    endpoint = replace(found.endpoint, address=found.endpoint.address or found.rendezvous.addresses[0])
    if endpoint.port is None:
        reason = "without a control channel none is reserved"
        endpoint = replace(endpoint, port=found.rendezvous.ports[0], port_reason=reason)
    return replace(found, endpoint=endpoint, rendezvous=None)
