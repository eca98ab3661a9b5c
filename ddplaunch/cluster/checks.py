"""Checks what was asked for against what was found. A contradiction is an error that names both; nothing is guessed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddplaunch.errors import LaunchError
from ddplaunch.options.node_parsers import write_nnodes
from ddplaunch.options.table import ALIAS_OF
from ddplaunch.spec import JobSpec
from ddplaunch.words import count

if TYPE_CHECKING:  # one node needs no list of hosts
    from ddplaunch.cluster.hostlist import Host


def several(spec: JobSpec) -> bool:
    """Whether more than one node was asked for."""
    return spec.nnodes[1] > 1


def nnodes_asked(spec: JobSpec) -> bool:
    """Whether the number of nodes was asked for."""
    return spec.origin("nnodes") != "default"


def asked_nnodes(spec: JobSpec) -> str:
    """Write the number of nodes as it was asked for."""
    return spec.asked("nnodes", write_nnodes(spec.nnodes))


def nnodes(spec: JobSpec, found: int, source: str, *, hint: str) -> tuple[int, int]:
    """Return the minimum and maximum number of nodes, where `found` agents have been started.

    Raises:
        LaunchError: another number was asked for.
    """
    if not nnodes_asked(spec):
        return found, found
    min_nodes, max_nodes = spec.nnodes
    if not min_nodes <= found <= max_nodes:
        raise LaunchError(f"{asked_nnodes(spec)}, but {source} has {count(found, 'node')}", hint=hint)
    return min_nodes, found


def node_rank(spec: JobSpec, found: int, source: str) -> int:
    """Return the rank of this node as `source` says.

    Raises:
        LaunchError: another one was asked for.
    """
    if spec.node_rank is not None and spec.node_rank != found:
        raise LaunchError(
            f"{spec.asked('node_rank', spec.node_rank)}, but {source} says that this is node {found}",
            hint="leave --node-rank out; or add --master-addr, then only flags count",
        )
    return found


def one_worker(spec: JobSpec, source: str, *, hint: str) -> None:
    """Check that each command is one worker, where `source` started one for each rank.

    Raises:
        LaunchError: several workers were asked for.
    """
    if spec.nproc_per_node not in (None, 1):
        asked = spec.asked("nproc_per_node", spec.nproc_per_node)
        raise LaunchError(f"{asked}, but {source} started ddplaunch once for each rank", hint=hint)


def workers_of_one_node(spec: JobSpec, nnodes: int) -> None:
    """Refuse a number of workers under a name by which another launcher counts those of all nodes.

    Raises:
        LaunchError: the job has several nodes.
    """
    workers, alias = spec.nproc_per_node, ALIAS_OF.get(spec.origin("nproc_per_node"))
    if nnodes == 1 or not isinstance(workers, int) or alias is None or not alias.of_all_nodes:
        return
    raise LaunchError(
        f"{spec.asked('nproc_per_node', workers)} would count the workers of all {nnodes} nodes; here they are counted on each",
        hint=f"type `--nproc-per-node {workers // nnodes}`" if workers % nnodes == 0 else "--nproc-per-node N",
    )


def refuse_host_filters(spec: JobSpec, source: str) -> None:
    """Refuse --include and --exclude where ddplaunch starts no agents; `source` says why.

    Raises:
        LaunchError: one of them is given.
    """
    for name in ("include", "exclude"):
        value = getattr(spec, name)
        if value and (devices := value.removeprefix("localhost:")) != value and name == "include":  # DeepSpeed's
            raise LaunchError(f"{spec.asked(name, value)}: no hosts are listed", hint=f"type `--devices {devices}`")
        if value and not spec.origin(name).endswith(".toml"):  # written for a list of hosts that may not be used now
            raise LaunchError(
                f"{spec.asked(name, value)}: {source}, so there are no hosts to choose from",
                hint="--hosts or --hostfile lists hosts",
            )


def endpoint_unused(spec: JobSpec, why: str) -> list[str]:
    """Note that an endpoint has no effect, if one was given."""
    return [f"{spec.asked('rdzv_endpoint', spec.rdzv_endpoint)} has no effect: {why}"] if spec.rdzv_endpoint else []


def slots_unused(spec: JobSpec, hosts: Sequence[Host]) -> list[str]:
    """Note that slots of a batch job do not count workers, where the user may expect that."""
    slots = max((host.slots or 1 for host in hosts), default=1)
    if slots == 1 or spec.nproc_per_node is not None:
        return []
    return [f"the {slots} slots of a host do not count workers: for as many, add --nproc-per-node {slots}"]
