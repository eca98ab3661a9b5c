"""A job on several hosts, as the dispatcher carries it out: what is started on each, and what holds for all. Data only."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from ddplaunch.spec import Fault


class AgentStart(Struct, frozen=True, kw_only=True):
    """How the agent of a host is started, and its order."""

    node_rank: int
    host: str  # for ssh
    argv: tuple[str, ...]
    # makes the first frame; it names all hosts, so that frames kept for all of them would take the square of their number
    order: Callable[[], bytes]


class RemoteJob(Struct, frozen=True, kw_only=True):
    """All that the dispatcher needs to know."""

    agents: tuple[AgentStart, ...]  # by node rank
    run_id: str
    command: tuple[str, ...]  # the program and its arguments
    starter: str
    python: str  # the interpreter on the hosts
    min_nodes: int
    env: Mapping[str, str]  # of ssh, or what else starts the agents
    open_files: tuple[int, int]  # RLIMIT_NOFILE (soft, hard) of those processes
    signals: frozenset[int]  # that the front passes on
    stops: frozenset[int]
    heartbeat_timeout: float  # seconds without a frame after which a host is lost
    rdzv_timeout: float  # seconds in which all hosts must have connected
    grace_period: float  # seconds
    quiet: bool
    reports_to_caller: bool  # why it failed goes to the caller of `launch()`, not to stderr
    chaos: tuple[Fault, ...]
