"""Asks each kind of cluster in turn where the job is; the first that knows it answers. Pure but for `read`, which gives files.

Flags come before what is found. Inside a worker only flags count: the variables there speak of the job that the worker is
part of, and a job started by it is another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ddplaunch.cluster import Allocation, checks, local
from ddplaunch.cluster.facts import ClusterFacts
from ddplaunch.errors import LaunchError
from ddplaunch.record import replace
from ddplaunch.spec import JobSpec

Recogniser = Callable[[ClusterFacts], Allocation | None]

# in the order in which they are asked; without any of its variables a cluster cannot be there, and is not even imported
_SIGNS: Mapping[str, tuple[str, ...]] = {
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
    """Give the hosts of the job and our place among them; `read` gives the text of a file or raises OSError.

    Raises:
        LaunchError: what was asked contradicts what was found, or is not enough.
    """
    scene = ClusterFacts(spec=spec, env=env, hostname=hostname, read=read)
    found = _find(scene)
    return _without_control(spec, found) if spec.no_control else found


def _find(scene: ClusterFacts) -> Allocation:
    spec = scene.spec
    if spec.simulate:
        from ddplaunch.cluster import simulate

        return simulate.allocate(spec)
    if spec.standalone or spec.cluster == "local":
        return local.discover(spec, scene.hostname)
    if spec.cluster:
        return _forced(scene, spec.cluster)
    for name in _order(scene):
        recognise, _ = _recogniser(name)
        if found := recognise(scene):
            return found
    found = local.discover(spec, scene.hostname)
    return replace(found, notes=(*found.notes, *_unused_index(scene)))


def _order(scene: ClusterFacts) -> list[str]:
    """The clusters that are worth asking, in their order."""
    names = ["ssh"] if scene.spec.hosts or scene.spec.hostfile else []
    if checks.several(scene.spec):
        names.append("static")
    if scene.value("TORCHELASTIC_RUN_ID"):  # set for each worker by ddplaunch and by torchrun
        return names
    found = [name for name, signs in _SIGNS.items() if scene.value(*signs)]
    if {"slurm", "mpi"} <= set(found):
        from ddplaunch.cluster import mpi

        if mpi.is_nearer_than_slurm(scene):
            found.remove("slurm")
    return names + found


def _forced(scene: ClusterFacts, name: str) -> Allocation:
    recognise, needs = _recogniser(name)
    found = recognise(scene)
    if found is None:
        raise LaunchError(
            f"{scene.spec.asked('cluster', name)}: this is no job of that kind, which has {needs}",
            hint="leave --cluster out to see what is found",
        )
    return found


def _recogniser(name: str) -> tuple[Recogniser, str]:
    """Give the function that knows this kind of cluster, and what it knows it by."""
    match name:
        case "static":
            from ddplaunch.cluster import static

            return static.discover, static.NEEDS
        case "ssh":
            from ddplaunch.cluster import ssh

            return ssh.discover, ssh.NEEDS
        case "slurm":
            from ddplaunch.cluster import slurm

            return slurm.discover, slurm.NEEDS
        case "kubernetes":
            from ddplaunch.cluster import kubernetes

            return kubernetes.discover, kubernetes.NEEDS
        case "mpi":
            from ddplaunch.cluster import mpi

            return mpi.discover, mpi.NEEDS
        case "pbs":
            from ddplaunch.cluster import pbs

            return pbs.discover, pbs.NEEDS
        case "lsf":
            from ddplaunch.cluster import lsf

            return lsf.discover, lsf.NEEDS
    raise AssertionError(name)


def _unused_index(scene: ClusterFacts) -> list[str]:
    index = scene.value("JOB_COMPLETION_INDEX")
    if index is None or checks.nnodes_asked(scene.spec) or scene.value("TORCHELASTIC_RUN_ID"):
        return []
    return [
        f"JOB_COMPLETION_INDEX={index} makes no node of this pod, since --nnodes is not given: it is a job of its own"
    ]


def _without_control(spec: JobSpec, found: Allocation) -> Allocation:
    """The allocation of nodes that do not talk: all that they would agree on has to be known before.

    Raises:
        LaunchError: it is not.
    """
    asked = spec.origin("no_control")
    if found.start:
        raise LaunchError(
            f"{asked}: agents that ddplaunch starts on other hosts talk to this one", hint="leave --no-control out"
        )
    if found.meeting is None:
        return found
    if found.node_rank is None:
        raise LaunchError(f"{asked}: nobody gives this node its rank", hint="add --node-rank and --master-addr")
    if found.nnodes[0] != found.nnodes[1]:
        raise LaunchError(f"{asked}: nodes that do not talk cannot agree on their number", hint="--nnodes N")
    # every node works these out alike
    address = found.address or found.meeting.addresses[0]
    port = found.port or found.meeting.ports[0]
    reason = "nodes that do not talk cannot reserve one" if found.port is None else found.port_reason
    return replace(found, address=address, port=port, port_reason=reason, meeting=None)
