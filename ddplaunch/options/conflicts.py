"""Which two options mean the same thing or exclude each other: a table, by which one of them is dropped or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from ddplaunch.errors import LaunchError
from ddplaunch.spec import Given


class Resolved(Struct, frozen=True, kw_only=True):
    """A value that has taken precedence, with what was written."""

    given: Given
    value: Any


class Conflict(Struct, frozen=True, kw_only=True):
    """Two options that mean the same thing or exclude each other; the one from the higher source wins."""

    names: tuple[str, str]
    hint: str
    agree: Callable[[Any, Any], bool] = lambda first, second: False


_CONFLICTS = (
    Conflict(
        names=("grace_period", "shutdown_timeout"),
        hint="both say how long a stop may take: leave one out",
        agree=lambda grace, shutdown: bool(grace == shutdown),
    ),
    Conflict(
        names=("gpus_per_worker", "workers_per_gpu"),
        hint="a worker has several GPUs, or several workers share one: leave one out",
    ),
    Conflict(
        names=("virtual_local_rank", "pin"),
        hint="--virtual-local-rank shows each worker its own device only: leave --pin out",
        agree=lambda virtual, pin: bool(pin == "visible"),
    ),
    Conflict(
        names=("cpu_bind", "numa_binding"),
        hint="both bind the workers to CPUs: leave one out",
        agree=lambda bind, numa: bool(bind == "none"),
    ),
    Conflict(names=("quiet", "verbose"), hint="leave one out"),
    Conflict(
        names=("debug", "debug_on_error"),
        hint="each gives the terminal to one rank, from its start or when it fails: leave one out",
    ),
    *(
        Conflict(names=("debugpy", name), hint="a rank has one debugger: leave one out")
        for name in ("debug", "debug_on_error")
    ),
    Conflict(names=("no_python", "debugpy"), hint="debugpy is for Python: --no-python runs a command"),
    Conflict(names=("no_python", "debug_on_error"), hint="the debugger is one for Python: --no-python runs a command"),
    Conflict(
        names=("timestamps", "output"),
        hint="raw output is shown as it is: leave one out",
        agree=lambda timestamps, output: bool(output != "raw"),
    ),
    Conflict(names=("module", "no_python"), hint="a module is run by python: leave one out"),
    Conflict(names=("module", "run_path"), hint="SCRIPT is a module's name or a file's path: leave one out"),
    Conflict(names=("no_python", "python"), hint="a command is run without an interpreter: leave one out"),
    Conflict(names=("mps", "simulate"), hint="each simulated node would start MPS for the same GPUs: leave one out"),
    Conflict(
        names=("no_python", "sharing_strategy"), hint="the strategy is set inside python: --no-python runs a command"
    ),
    Conflict(
        names=("keep_warm", "start_method"),
        hint="what is kept warm forks the workers: leave one out",
        agree=lambda keep, method: bool(method == "forkserver"),
    ),
    Conflict(names=("hosts", "hostfile"), hint="both say which hosts there are: leave one out"),
    Conflict(names=("include", "exclude"), hint="name the hosts to use or those not to use: leave one out"),
    *(
        Conflict(names=("simulate", name), hint="all simulated nodes are on this machine: leave one out")
        for name in ("hosts", "hostfile", "node_rank")
    ),
    Conflict(
        names=("simulate", "cluster"),
        hint="all simulated nodes are on this machine: leave --cluster out",
        agree=lambda simulate, cluster: bool(cluster == "local"),
    ),
    *(
        conflict
        for name in ("hosts", "hostfile")
        for conflict in (
            Conflict(
                names=(name, "cluster"),
                hint="on hosts that you name, agents are started over ssh: leave one out",
                agree=lambda hosts, cluster: bool(cluster == "ssh"),
            ),
            Conflict(names=(name, "node_rank"), hint="hosts that you name have ranks in their order: leave one out"),
            Conflict(names=("standalone", name), hint="--standalone means one node, this one: leave one out"),
        )
    ),
)


def drop_lower(resolved: dict[str, Resolved]) -> None:
    """Drop, of two options in conflict, the one from the lower source.

    Raises:
        LaunchError: both have the same source, and different meanings.
    """
    for conflict in _CONFLICTS:
        first, second = (resolved.get(name) for name in conflict.names)
        if first is None or second is None or conflict.agree(first.value, second.value):
            continue
        if first.given.source == second.given.source:
            raise not_together(first, second, conflict.hint)
        del resolved[min(first, second, key=lambda one: one.given.source).given.name]


def not_together(first: Resolved, second: Resolved, hint: str) -> LaunchError:
    """Say that two options do not go together."""
    return LaunchError(f"{first.given} and {second.given} do not go together", hint=hint)
