"""WHERE: which hosts the job has and which of them this is. Pure: every answer comes from an environment mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from ddplaunch.spec.job import JobSpec
from ddplaunch.spec.options import token

if TYPE_CHECKING:  # one node needs no list of hosts
    from ddplaunch.plan.cluster.hostlist import Host


class Rendezvous(Struct, frozen=True, kw_only=True):
    """The rendezvous of agents that ddplaunch does not start itself."""

    addresses: tuple[str, ...]  # host names or numeric addresses of the coordinator, in the order to try
    ports: tuple[int, ...]  # candidates, in order: one that is taken is skipped
    coordinator: bool | None  # whether this agent is the coordinator; None: it is if the address is its host's
    listen: str | None = None  # numeric address to listen on; None: all


class Task(Struct, frozen=True, kw_only=True):
    """The place of a command that was started once for each rank, as by `mpirun -n 8`."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nnodes: int
    node_cpus: int | None = None  # that all such commands of this node have together; None: not known


class Endpoint(Struct, frozen=True):
    """Where workers on every host find rank 0, and why there: a phrase for each, or the option that sets it."""

    address: str | None  # None: chosen by the coordinator
    address_reason: str
    port: int | None  # None: one that is reserved when the job starts
    port_reason: str


class Allocation(Struct, frozen=True, kw_only=True):
    """The hosts that a job was given, in rank order, and our place among them."""

    cluster: str  # "local", "static", "slurm", ...
    nnodes: tuple[int, int] = (1, 1)  # minimum, maximum
    node_rank: int | None = 0  # None: the coordinator assigns one, in order of arrival
    hosts: tuple[str, ...] = ()  # by node rank; (): not known
    endpoint: Endpoint
    rendezvous: Rendezvous | None = None  # None: one node, or agents that we start ourselves
    hosts_to_start_on: tuple[
        Host, ...
    ] = ()  # in rank order; (): somebody else starts the agents, or there is but this one
    starter: str = ""  # how: "ssh", "blaunch", "srun", "simulate"
    is_here: bool = False  # the only one of them is this host, where the agent could be this command's own
    task: Task | None = None
    nproc_per_node: int | None = None  # workers of this node as the cluster says, if it does
    tasks_per_node: int | None = None  # requested from the cluster: workers of a node without accelerators
    requeues: int = 0  # how often the cluster has started this job again
    sent_again: frozenset[int] = frozenset()  # stop signals that the scheduler may send more than once
    has_front: bool = False  # a command has started all agents, this one too, and coordinates them
    authenticated: bool = True  # the agents share a secret, or do not talk
    identity: str = ""  # unique to the job, known to all its agents: "slurm 84.0"; "" if there is no such name
    notes: tuple[str, ...] = ()  # what a reader of the plan should know, one sentence each
    warnings: tuple[str, ...] = ()  # what whoever starts the job should know as well
    doubt: str = ""  # why the variables may be left over from another job: said wherever they are read

    @property
    def has_one_screen(self) -> bool:
        """Whether the output of all nodes is shown in one place."""
        return bool(self.hosts_to_start_on) or self.cluster in ("slurm", "mpi")

    @property
    def is_elastic(self) -> bool:
        """Whether the job goes on when a node is lost, be it the coordinator's."""
        least, most = self.nnodes
        return least < most

    @property
    def nodes_leave(self) -> bool:
        """Whether SIGTERM to an agent has its node leave the job, which goes on: the user has started each agent alone."""
        return self.is_elastic and not self.hosts_to_start_on and not self.has_front


class AllocatedJob(Struct, frozen=True, kw_only=True):
    """A job whose hosts are known: what was asked for, the variables of the command, and the allocation."""

    spec: JobSpec
    env: Mapping[str, str]  # with the secret of the agents, if they have one: `token.VARIABLE`
    allocation: Allocation

    @property
    def public_env(self) -> dict[str, str]:
        """The variables that workers may see."""
        return token.visible_to_workers(self.env)

    @property
    def agents_meet(self) -> bool:
        """Whether this node's agent meets those of other nodes, none of which this command has started."""
        return self.allocation.rendezvous is not None and not self.spec.no_control
