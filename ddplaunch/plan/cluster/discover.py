"""Tries each kind of cluster in turn; the first that recognises its variables wins. Pure, except for what `Here` is asked.

Flags come before what is found. Inside a worker only flags count: the variables there describe the job that the worker is
part of, and a job started by it is another.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.plan.cluster import Allocation, by_flags, checks
from ddplaunch.plan.cluster.checks import ClusterFacts
from ddplaunch.spec.job import JobSpec
from ddplaunch.system.errors import LaunchError


class Kind(Struct, frozen=True):
    """A kind of cluster, and how its jobs are recognised."""

    recogniser: str  # "module.function" of this folder: returns an Allocation, or None for a job of another kind
    needs: str  # what it recognises a job by, for messages
    variables: tuple[str, ...] = ()  # without any of these the module is not even imported; (): flags decide


# in the order in which they are tried
KINDS: Mapping[str, Kind] = {
    "ssh": Kind("listed.discover_ssh", "--hosts or --hostfile"),
    "static": Kind("by_flags.discover_static", "--nnodes with --node-rank and --master-addr, or with --rdzv-endpoint"),
    "slurm": Kind("slurm.discover", "SLURM_JOB_ID", ("SLURM_JOB_ID", "SLURM_JOBID")),
    "kubernetes": Kind(
        "kubernetes.discover", "JOB_COMPLETION_INDEX, or RANK and WORLD_SIZE in a pod", ("JOB_COMPLETION_INDEX", "RANK")
    ),
    "mpi": Kind(
        "mpi.discover",
        "OMPI_COMM_WORLD_RANK, PMI_RANK, PALS_RANKID, FLUX_TASK_RANK or the like, of several processes",
        (
            "OMPI_COMM_WORLD_RANK",
            "MV2_COMM_WORLD_RANK",
            "FLUX_TASK_RANK",
            "JSM_NAMESPACE_RANK",
            "PALS_RANKID",
            "PMI_RANK",
        ),
    ),
    "pbs": Kind("listed.discover_pbs", "PBS_NODEFILE", ("PBS_NODEFILE",)),
    "lsf": Kind("listed.discover_lsf", "LSB_JOBID with LSB_MCPU_HOSTS or LSB_DJOB_HOSTFILE", ("LSB_JOBID",)),
}


def discover(facts: ClusterFacts) -> Allocation:
    """Return the hosts of the job and which of them this is.

    Raises LaunchError: what was asked contradicts what was found, or is not enough.
    """
    spec, found = facts.spec, _find(facts)
    checks.refuse_workers_of_all_nodes(spec, found.nnodes[1])
    if spec.spares:
        is_commanded = bool(found.hosts_to_start_on) or found.has_front
        checks.check_spares(spec, found.nnodes[1], is_per_rank=found.task is not None, is_commanded=is_commanded)
    return _without_control(spec, found) if spec.no_control else found


def _find(facts: ClusterFacts) -> Allocation:
    """Return the allocation: by options if they say which kind, else of the first kind that is recognised, else by flags alone.

    Raises LaunchError: there is no job of the kind that --cluster names, or flags alone are not enough.
    """
    spec = facts.spec
    if spec.simulate:
        return by_flags.simulated(spec)
    if spec.standalone or spec.cluster == "local":
        return by_flags.discover_local(spec, facts.hostname)
    for name in [spec.cluster] if spec.cluster else _candidates(facts):
        if found := _recognise(facts, name):
            return found
    if spec.cluster:
        kind = KINDS[spec.cluster]
        missing = (
            f"not inside a job of this kind, which sets {kind.needs}" if kind.variables else f"it needs {kind.needs}"
        )
        hint = "leave --cluster out to see what is found"
        raise LaunchError(f"{spec.typed('cluster', spec.cluster)}: {missing}", hint=hint)
    found = by_flags.discover_local(spec, facts.hostname)
    return replace(found, notes=(*found.notes, *_note_pod_index_unused(facts)))


def _note_pod_index_unused(facts: ClusterFacts) -> list[str]:
    """Note that an Indexed Job of Kubernetes is not taken for one job of all its pods, where the user may expect that."""
    index = facts.value("JOB_COMPLETION_INDEX")
    if index is None or checks.has_nnodes_given(facts.spec) or _is_inside_worker(facts):
        return []
    return [f"JOB_COMPLETION_INDEX={index} is ignored, since --nnodes is not given: this pod is a job of its own"]


def _candidates(facts: ClusterFacts) -> list[str]:
    """Return the kinds of cluster to try, in order: those that flags ask for, then those of which a variable is set."""
    names = ["ssh"] if facts.spec.hosts or facts.spec.hostfile else []
    if facts.spec.nnodes[1] > 1:
        names.append("static")
    if _is_inside_worker(facts):  # the other variables describe the job of that worker
        return names
    found = [name for name, kind in KINDS.items() if facts.value(*kind.variables)]
    if {"slurm", "mpi"} <= set(found):
        from ddplaunch.plan.cluster import mpi

        if mpi.started_inside_slurm(facts):  # then mpirun, and not Slurm, has placed the processes of this job
            found.remove("slurm")
    return names + found


def _is_inside_worker(facts: ClusterFacts) -> bool:
    return facts.value("TORCHELASTIC_RUN_ID") is not None  # ddplaunch and torchrun set it for each worker


def _recognise(facts: ClusterFacts, name: str) -> Allocation | None:
    module, _, function = KINDS[name].recogniser.partition(".")
    recogniser = getattr(import_module(f"ddplaunch.plan.cluster.{module}"), function)  # most jobs are in no cluster
    found: Allocation | None = recogniser(facts)
    return found


def _without_control(spec: JobSpec, found: Allocation) -> Allocation:
    """Return the allocation without a control channel: all that the nodes would agree on has to be known before."""
    asked = spec.origin("no_control")
    if found.hosts_to_start_on:
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
