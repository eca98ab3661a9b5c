"""Pods that a controller started, one for each node: Kubeflow's PyTorchJob, an Indexed Job, a JobSet.

What the controllers and the usual manifests set:
- PyTorchJob (kubeflow/training-operator, pkg/controller.v1/pytorch/envvar.go) and the platforms that copy it: MASTER_ADDR,
  MASTER_PORT, WORLD_SIZE, RANK for each pod. RANK counts pods. WORLD_SIZE counts pods too, unless the job says how many
  workers a pod has: then newer versions count workers, and set PET_NNODES and PET_NODE_RANK.
- TrainJob (kubeflow/trainer): PET_* alone, which are flags to us.
- Indexed Job: JOB_COMPLETION_INDEX. An index alone makes no job of several nodes: most Indexed Jobs are many single ones.
- JobSet: its manifests often set JOBSET_NAME and REPLICATED_JOB_NAME from labels; its pods are called JOBSET-JOB-0-INDEX.JOBSET
  (https://jobset.sigs.k8s.io/docs/concepts/).
"""

from __future__ import annotations

from ddplaunch.cluster import Allocation, checks, endpoints
from ddplaunch.cluster.allocate import met
from ddplaunch.cluster.facts import NOT_HERE, ClusterFacts
from ddplaunch.errors import LaunchError

NEEDS = "JOB_COMPLETION_INDEX, or RANK and WORLD_SIZE in a pod"


def discover(scene: ClusterFacts) -> Allocation | None:
    """Give the allocation of the pods that we are one of; None if this is no pod, or one that is a job of its own.

    Raises:
        LaunchError: variables and flags contradict each other, or nothing says where node 0 is.
    """
    spec = scene.spec
    rank, size = _controller(scene)
    index = scene.number("JOB_COMPLETION_INDEX")
    if rank is None and index is None:
        return None
    nodes = spec.nnodes[1] if checks.nnodes_asked(spec) else size
    if nodes is None or nodes == 1:
        return None
    node_rank = _node_rank(scene, rank, index, nodes)
    _check_size(scene, size, nodes)
    checks.nothing_to_choose(spec, "the pods run already")
    address, reason = _address(scene, node_rank)
    port = _port(scene)
    return met(
        spec,
        cluster="kubernetes",
        nnodes=spec.nnodes if checks.nnodes_asked(spec) else (nodes, nodes),
        node_rank=node_rank,
        addresses=(address,),
        reason=reason,
        port=(port, "MASTER_PORT") if port else None,
        ports=endpoints.ports_beside(spec.master_port or port or endpoints.STATIC_PORT),
        coordinator=node_rank == 0,
        nproc_per_node=_workers(scene),
        notes=() if checks.nnodes_asked(spec) else (f"WORLD_SIZE={size} is taken for the number of pods",),
    )


def _node_rank(scene: ClusterFacts, rank: int | None, index: int | None, nodes: int) -> int:
    """Which pod this is.

    Raises:
        LaunchError: one that the job does not have.
    """
    spec = scene.spec
    if rank is not None:
        found, source = checks.node_rank(spec, rank, "RANK"), "RANK"
    elif spec.node_rank is not None:
        found, source = spec.node_rank, spec.origin("node_rank")  # a JobSet of several Jobs counts in each anew
    else:
        found, source = index or 0, "JOB_COMPLETION_INDEX"
    if found >= nodes:
        said = checks.asked_nnodes(spec) if checks.nnodes_asked(spec) else f"WORLD_SIZE={nodes}"
        raise LaunchError(f"{said}, but {source} says that this is node {found}", hint=NOT_HERE)
    return found


def _port(scene: ClusterFacts) -> int | None:
    port = scene.number("MASTER_PORT")
    if port is not None and port > 65535:
        raise LaunchError(f"MASTER_PORT={port} is not a port", hint="unset it, or give another with --master-port")
    return port or None


def _workers(scene: ClusterFacts) -> int | None:
    """What the platforms that copy PyTorchJob say of the GPUs of a pod, in their manuals a number."""
    said = scene.value("NPROC_PER_NODE") or ""
    return int(said) if said.isascii() and said.isdigit() and 0 < len(said) < 6 and int(said) else None


def _controller(scene: ClusterFacts) -> tuple[int | None, int | None]:
    """The rank and the number of pods that a controller wrote, as far as it did."""
    # RANK and WORLD_SIZE are also what every worker of every launcher has: only outside of one they speak of pods
    if not scene.value("KUBERNETES_SERVICE_HOST") or scene.value("LOCAL_RANK"):
        return None, None
    return scene.number("RANK"), scene.number("WORLD_SIZE")


def _check_size(scene: ClusterFacts, size: int | None, nodes: int) -> None:
    """See to it that WORLD_SIZE counts as many pods as nodes were asked for, or the workers on them.

    Raises:
        LaunchError: it does not.
    """
    spec = scene.spec
    least, most = spec.nnodes
    if size is None or size == nodes or (least < most and least <= size <= most):
        return
    workers = spec.nproc_per_node
    if size == nodes * workers if isinstance(workers, int) else size % nodes == 0:
        return
    raise LaunchError(
        f"{checks.asked_nnodes(spec)}, but WORLD_SIZE={size} counts other pods",
        hint="leave --nnodes out, or unset WORLD_SIZE",
    )


def _address(scene: ClusterFacts, node_rank: int) -> tuple[str, str]:
    """Where node 0 is, and what says so.

    Raises:
        LaunchError: nothing does.
    """
    if asked := endpoints.first(scene.spec, (scene.spec.master_addr, "master_addr")):
        return asked
    if address := scene.value("MASTER_ADDR"):
        return address, "MASTER_ADDR"
    jobset, job = scene.value("JOBSET_NAME"), scene.value("REPLICATED_JOB_NAME")
    if jobset and job:
        return f"{jobset}-{job}-0-0.{jobset}", "JOBSET_NAME and REPLICATED_JOB_NAME"
    head = scene.hostname.removesuffix(f"-{node_rank}")
    pod = f"{head}-0" if head != scene.hostname else "POD-0"
    raise LaunchError(
        "nothing says where node 0 is: MASTER_ADDR is not set in this pod",
        hint=f"add --master-addr {pod}.SERVICE, where SERVICE is the headless service of the job (its subdomain)",
    )
