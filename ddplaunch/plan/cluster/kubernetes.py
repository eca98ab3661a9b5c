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

from ddplaunch.plan.cluster import Allocation, checks, endpoints
from ddplaunch.plan.cluster.checks import HOW_TO_IGNORE, ClusterFacts
from ddplaunch.spec.job import JobSpec
from ddplaunch.spec.options.parsers import digits
from ddplaunch.system.errors import LaunchError


def discover(facts: ClusterFacts) -> Allocation | None:
    """Return the allocation of our job's pods; None outside of a pod, or in a pod that is a job of its own or has no rank.

    Raises LaunchError: variables and flags contradict each other, or the address of node 0 is not known.
    """
    spec = facts.spec
    rank, size = None, None  # as the controller counts pods; None: it does not
    # launchers set RANK and WORLD_SIZE, too, to count workers; they set LOCAL_RANK with them, which no controller does
    is_inside_worker = bool(facts.value("LOCAL_RANK"))
    if facts.value("KUBERNETES_SERVICE_HOST") and not is_inside_worker:
        rank, size = facts.number("RANK"), facts.number("WORLD_SIZE")
    index = facts.number("JOB_COMPLETION_INDEX")
    has_rank = rank is not None or index is not None
    nodes = spec.nnodes[1] if checks.has_nnodes_given(spec) else size
    if not has_rank or nodes is None or nodes == 1:
        return None
    node_rank = _node_rank(facts, rank, index, nodes)
    _check_size(spec, size, nodes)
    checks.refuse_host_filters(spec, "the pods are running already")
    port = facts.number("MASTER_PORT")
    if port is not None and port > 65535:
        raise LaunchError(f"MASTER_PORT={port} is not a port", hint="unset it, or give another with --master-port")
    address, reason = _address(facts, node_rank)
    endpoint, rendezvous = endpoints.of_agents(
        spec,
        (address,),
        reason,
        port=(port, "MASTER_PORT") if port else endpoints.PORT_AT_START,
        ports=endpoints.ports_beside(spec.master_port or port or endpoints.STATIC_PORT),
        coordinator=node_rank == 0,
    )
    workers = digits(facts.value("NPROC_PER_NODE") or "")  # the GPUs of a pod, which platforms that copy PyTorchJob set
    notes = () if checks.has_nnodes_given(spec) else (f"WORLD_SIZE={size} is taken as the number of pods",)
    return Allocation(
        cluster="kubernetes",
        nnodes=spec.nnodes if checks.has_nnodes_given(spec) else checks.nnodes_of_all(spec, nodes),
        node_rank=node_rank,
        endpoint=endpoint,
        rendezvous=rendezvous,
        nproc_per_node=workers if workers and workers < 100_000 else None,  # more are not meant as a number of workers
        notes=(*notes, *checks.endpoint_unused(spec, "kubernetes determines the endpoint")),
    )


def _node_rank(facts: ClusterFacts, rank: int | None, index: int | None, nodes: int) -> int:
    """Return the node rank of this pod: RANK of the controller, else --node-rank, else the index of an Indexed Job.

    Raises LaunchError: there are not so many nodes.
    """
    spec = facts.spec
    if rank is not None:
        found, source = checks.node_rank(spec, rank, "RANK"), "RANK"
    elif spec.node_rank is not None:
        # wins over the index: each Job of a JobSet counts its pods from 0, so that only flags can count all
        found, source = spec.node_rank, spec.origin("node_rank")
    else:
        assert index is not None, "without a rank of the controller there is an index"
        found, source = index, "JOB_COMPLETION_INDEX"
    if found >= nodes:
        limit = checks.nnodes_as_typed(spec) if checks.has_nnodes_given(spec) else f"WORLD_SIZE={nodes}"
        raise LaunchError(f"{limit}, but {source} says that this is node {found}", hint=HOW_TO_IGNORE)
    return found


def _check_size(spec: JobSpec, size: int | None, nodes: int) -> None:
    """Check that WORLD_SIZE of the controller fits --nnodes: it may count the nodes, or the workers on all of them."""
    if size is None or size == nodes:
        return
    least, most = spec.nnodes
    is_elastic = least < most
    workers = spec.nproc_per_node
    counts_workers = size == nodes * workers if isinstance(workers, int) else size % nodes == 0
    counts_pods_so_far = is_elastic and least <= size <= most
    if counts_pods_so_far or counts_workers:
        return
    raise LaunchError(
        f"{checks.nnodes_as_typed(spec)}, but WORLD_SIZE={size} counts other pods",
        hint="leave --nnodes out, or unset WORLD_SIZE",
    )


def _address(facts: ClusterFacts, node_rank: int) -> tuple[str, str]:
    """Return the address of node 0 and its origin: the flag, else MASTER_ADDR, else the name of a JobSet's first pod."""
    if asked := endpoints.first_given(facts.spec, (facts.spec.master_addr, "master_addr")):
        return asked
    if address := facts.value("MASTER_ADDR"):
        return address, "MASTER_ADDR"
    jobset, job = facts.value("JOBSET_NAME"), facts.value("REPLICATED_JOB_NAME")
    if jobset and job:
        return f"{jobset}-{job}-0-0.{jobset}", "JOBSET_NAME and REPLICATED_JOB_NAME"
    # a pod of an Indexed Job is called JOB-INDEX
    job_name = facts.hostname.removesuffix(f"-{node_rank}")
    pod_0 = f"{job_name}-0" if job_name != facts.hostname else "POD-0"
    raise LaunchError(
        "the address of node 0 is not known: MASTER_ADDR is not set in this pod",
        hint=f"add --master-addr {pod_0}.SERVICE, where SERVICE is the headless service of the job (its subdomain)",
    )
