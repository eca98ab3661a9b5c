"""What discovery reads, and what was asked for against what was found. A contradiction is an error that names both.

Nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from ddplaunch.spec.job import JobSpec
from ddplaunch.spec.options.parsers import digits, write_nnodes
from ddplaunch.spec.options.sources import is_link
from ddplaunch.spec.options.table import ALIAS_OF
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.words import count, why_failed

_LARGEST_NUMBER = 2**32  # what Slurm counts its special steps down from
_DEEPEST = 1000  # processes one above the other: a pid may be another's by the time that it is read


class Here(Protocol):
    """The host where the command was started, which is asked beside the variables."""

    def read(self, path: str) -> str:
        """Return the text of a file; raise OSError, or UnicodeDecodeError."""

    def doubt_about_job(self, nodes: Sequence[str]) -> str:
        """Return why we may not be in the Slurm job that the variables name, with these nodes; "" if we surely are.

        Raises LaunchError: we surely are not.
        """


class ClusterFacts(Struct, frozen=True, kw_only=True):
    """What discovery reads on the host where the command was started."""

    spec: JobSpec
    env: Mapping[str, str]
    hostname: str
    here: Here
    avoided: tuple[str, ...] = ()  # hosts that --avoid-bad-nodes leaves out, if others are enough

    def value(self, *names: str) -> str | None:
        """The first of these variables that is set to something."""
        name = self._first_set(names)
        return None if name is None else self.env[name]

    def number(self, *names: str) -> int | None:
        """The number that the first of these variables holds, None if none is set."""
        name = self._first_set(names)
        if name is None:
            return None
        value = digits(self.env[name])
        if value is None or value > _LARGEST_NUMBER:
            raise LaunchError(f"{name}={printable(self.env[name])} is not a number", hint=HOW_TO_IGNORE)
        return value

    def needed(self, *names: str) -> int:
        """The number that the first of these variables holds."""
        found = self.number(*names)
        if found is None:
            raise LaunchError(
                f"{names[0]} is not set, although other variables of the same cluster are", hint=HOW_TO_IGNORE
            )
        return found

    def _first_set(self, names: Sequence[str]) -> str | None:
        """The first of these names with a value that is not the address of a Service, as Kubernetes sets MASTER_PORT for one."""
        return next((name for name in names if (text := self.env.get(name)) and not is_link(name, text)), None)

    def text_of(self, path: str, origin: str) -> str:
        """The text of a file."""
        try:
            return self.here.read(path)
        except OSError as error:
            raise LaunchError(f"{origin}: {why_failed(error)}") from None
        except UnicodeDecodeError:
            raise LaunchError(f"{origin}: it is not UTF-8 text") from None


def printable(text: str) -> str:
    """Write the value of a variable as messages show it."""
    return text if text.isprintable() else ascii(text)


def processes_above(read: Callable[[str], str]) -> tuple[str, ...] | None:
    """Return the names of all processes above this one, the parent first; None if /proc does not show them all.

    In a container /proc shows only those inside: the last is the first process of the container.
    """
    pid, names = "self", []
    for _ in range(_DEEPEST):
        try:
            # "PID (NAME) STATE PARENT ...", where the name may have brackets of its own (proc(5))
            name, _, fields = read(f"/proc/{pid}/stat").partition("(")[2].rpartition(")")
        except (OSError, UnicodeDecodeError):
            return None
        names.append(name)
        pid = fields.split()[1]
        if pid == "0":  # the first process has no parent
            return tuple(names[1:])  # without this process itself
    return None


def is_typed_in_shell(read: Callable[[str], str]) -> bool:
    """Return whether a shell on a terminal has started this process as a command that was typed there; False if /proc hides it.

    Such a shell leads the session of its terminal, and gives each command a process group of its own. A shell that runs a script
    or `-c COMMAND` has that as an argument; most of those give their commands no group, but `bash -ic` does.
    """
    try:
        # "PID (NAME) STATE PARENT GROUP SESSION TERMINAL ..." (proc(5)); the terminal is 0 if there is none
        _, _, group, session, terminal = read("/proc/self/stat").rpartition(")")[2].split()[:5]
        if terminal == "0" or group == session:
            return False
        _, *arguments = read(f"/proc/{session}/cmdline").rstrip("\0").split("\0")
    except (OSError, ValueError):
        return False
    return all(argument.startswith("-") for argument in arguments)


HOW_TO_IGNORE = "to ignore these variables: --cluster local, or unset them"


# --- the checks


def has_nnodes_given(spec: JobSpec) -> bool:
    """Whether the number of nodes was asked for."""
    return spec.origin("nnodes") != "default"


def nnodes_as_typed(spec: JobSpec) -> str:
    """Write the number of nodes as it was asked for."""
    least, most = spec.nnodes
    asked = spec.typed("nnodes", write_nnodes((least, most - spec.spares)))
    return f"{asked} with {spec.typed('spares', spec.spares)}" if spec.spares else asked


def nnodes_of_all(spec: JobSpec, found: int) -> tuple[int, int]:
    """Return the minimum and maximum number of nodes where all that were `found` take part, if only as spares."""
    return max(1, found - spec.spares), found


def check_spares(spec: JobSpec, found: int, *, is_per_rank: bool, is_commanded: bool) -> None:
    """Refuse spares (nodes that wait to take a lost node's place) if too few nodes run workers, or each agent is one rank.

    `found` counts all nodes. `is_commanded`: a command starts all agents and coordinates them, so that node 0 may be lost.
    """
    asked = nnodes_as_typed(spec) if has_nnodes_given(spec) else spec.typed("spares", spec.spares)
    if is_per_rank:
        raise LaunchError(f"{asked}: ddplaunch was started once for each rank", hint="start it once on each node")
    with_workers, least = found - spec.spares, spec.nnodes[0]  # `least` is 1 if no number was asked for
    if with_workers < least:
        raise LaunchError(
            f"{asked}, but there {'is' if found == 1 else 'are'} {count(found, 'node')}",
            hint="--nnodes counts the nodes that run workers, without the spares",
        )
    if with_workers == 1 and not is_commanded:
        raise LaunchError(
            f"{asked}: the only node is node 0, and a spare alone cannot take its place",
            hint="a spare takes the place of any other node: `--nnodes 2`",
        )


def nnodes(spec: JobSpec, found: int, source: str, *, hint: str) -> tuple[int, int]:
    """Return the minimum and maximum number of nodes, where `found` agents have been started."""
    if not has_nnodes_given(spec):
        return nnodes_of_all(spec, found)
    min_nodes, max_nodes = spec.nnodes
    if not min_nodes <= found <= max_nodes:
        raise LaunchError(f"{nnodes_as_typed(spec)}, but {source} has {count(found, 'node')}", hint=hint)
    return min_nodes, found


def node_rank(spec: JobSpec, found: int, source: str) -> int:
    """Return the rank of this node as `source` says."""
    if spec.node_rank is not None and spec.node_rank != found:
        raise LaunchError(
            f"{spec.typed('node_rank', spec.node_rank)}, but {source} says that this is node {found}",
            hint="leave --node-rank out; or add --master-addr, then only flags count",
        )
    return found


def check_one_worker(spec: JobSpec, source: str, *, hint: str) -> None:
    """Check that each command is one worker, where `source` started one for each rank."""
    if spec.nproc_per_node not in (None, 1):
        asked = spec.typed("nproc_per_node", spec.nproc_per_node)
        raise LaunchError(f"{asked}, but {source} started ddplaunch once for each rank", hint=hint)


def refuse_workers_of_all_nodes(spec: JobSpec, nnodes: int) -> None:
    """Refuse a number of workers under a name by which another launcher counts those of all nodes."""
    workers, alias = spec.nproc_per_node, ALIAS_OF.get(spec.origin("nproc_per_node"))
    if nnodes == 1 or not isinstance(workers, int) or alias is None or not alias.of_all_nodes:
        return
    raise LaunchError(
        f"{spec.typed('nproc_per_node', workers)} would count the workers of all {nnodes} nodes; here they are counted on each",
        hint=f"type `--nproc-per-node {workers // nnodes}`"
        if workers % nnodes == 0
        else "type `--nproc-per-node N`, with the workers of one node",
    )


def refuse_host_filters(spec: JobSpec, source: str) -> None:
    """Refuse --include and --exclude where ddplaunch starts no agents; `source` says why."""
    for name in ("include", "exclude"):
        value = getattr(spec, name)
        if not value:
            continue
        if name == "include" and value.startswith("localhost:"):  # how DeepSpeed chooses GPUs of one machine
            devices = value.removeprefix("localhost:")
            raise LaunchError(f"{spec.typed(name, value)}: no hosts are listed", hint=f"type `--devices {devices}`")
        # a file of settings may have the filter for jobs on a list of hosts, and this job has none
        is_from_file = spec.origin(name).endswith(".toml")
        if not is_from_file:
            raise LaunchError(
                f"{spec.typed(name, value)}: {source}, so there are no hosts to choose from",
                hint="--hosts or --hostfile lists hosts",
            )


def endpoint_unused(spec: JobSpec, why: str) -> list[str]:
    """Note that an endpoint has no effect, if one was given."""
    return [f"{spec.typed('rdzv_endpoint', spec.rdzv_endpoint)} has no effect: {why}"] if spec.rdzv_endpoint else []
