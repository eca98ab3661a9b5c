"""What was given, settled and checked: a JobSpec. Looks at no machine; reads the files of --env-file and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ddplaunch.envfile import variables
from ddplaunch.errors import LaunchError
from ddplaunch.options.option import Given
from ddplaunch.record import fields_of, record
from ddplaunch.spec import JobSpec, Program, ProgramKind
from ddplaunch.values import BadValue

# set for each worker from its place: a value for all of them would be wrong for all but one
_OF_PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE",
             "ROLE_RANK", "ROLE_WORLD_SIZE")  # fmt: skip
_HAVE_A_FLAG = {"MASTER_ADDR": "--master-addr", "MASTER_PORT": "--master-port", "ROLE_NAME": "--role"}
_FIELDS = frozenset(fields_of(JobSpec))
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]", "::1")


@record(kw_only=True)
class Settled:
    """A value that counts, with what was written."""

    given: Given
    value: Any


@record(kw_only=True)
class Rivals:
    """Two options that mean the same thing or exclude each other; the one from the higher source wins."""

    names: tuple[str, str]
    hint: str
    agree: Callable[[Any, Any], bool] = lambda first, second: False


_RIVALS = (
    Rivals(
        names=("grace_period", "shutdown_timeout"),
        hint="both say how long a stop may take: leave one out",
        agree=lambda grace, shutdown: bool(grace == shutdown),
    ),
    Rivals(
        names=("gpus_per_worker", "workers_per_gpu"),
        hint="a worker has several GPUs, or several workers share one: leave one out",
    ),
    Rivals(
        names=("virtual_local_rank", "pin"),
        hint="--virtual-local-rank shows each worker its own device only: leave --pin out",
        agree=lambda virtual, pin: bool(pin == "visible"),
    ),
    Rivals(
        names=("cpu_bind", "numa_binding"),
        hint="both bind the workers to CPUs: leave one out",
        agree=lambda bind, numa: bool(bind == "none"),
    ),
    Rivals(names=("quiet", "verbose"), hint="leave one out"),
    Rivals(names=("module", "no_python"), hint="a module is run by python: leave one out"),
    Rivals(names=("module", "run_path"), hint="SCRIPT is a module's name or a file's path: leave one out"),
    Rivals(names=("no_python", "python"), hint="a command is run without an interpreter: leave one out"),
)


def job_spec(given: Iterable[Given], program: Sequence[str]) -> JobSpec:
    """Settle what was given, in any order, into the job that runs `program`: SCRIPT and its arguments.

    Raises:
        LaunchError: a value means nothing, or two of them do not go together.
    """
    given = sorted(given, key=lambda one: one.source)
    env = _environment([one for one in given if one.option.target == "env"])
    last = {one.option.name: one for one in given if one.option.target != "env"}
    settled = {name: Settled(given=one, value=one.value()) for name, one in last.items()}
    for name in [name for name, one in settled.items() if one.value is False]:
        del settled[name]  # a flag that a variable or a file sets to 0 is not there
    for rivals in _RIVALS:
        _settle(settled, rivals)
    _check_together(settled)
    if not program:
        raise LaunchError(
            "there is no SCRIPT to run", hint="ddplaunch [OPTIONS] SCRIPT [ARGS]...; see ddplaunch --help"
        )
    fields = {one.given.option.target: one for one in settled.values() if one.given.option.target in _FIELDS}
    origins = {name: one.given.origin for name, one in fields.items()}
    if env:
        origins["env"] = ", ".join(dict.fromkeys(one.origin for one in given if one.option.target == "env"))
    values = {name: one.value for name, one in fields.items()}
    values["verbosity"] = ("verbose" in settled) - ("quiet" in settled)
    return JobSpec(
        program=_program(settled, program),
        env=tuple(env.items()),
        origins=origins,
        remarks=tuple(_remarks(settled)),
        **values,
    )


def _environment(given: Sequence[Given]) -> dict[str, str]:
    """Variables for the workers: of files first, since --env wins over --env-file, whichever comes later."""
    merged: dict[str, str] = {}
    for one in sorted(given, key=lambda one: (one.source, one.option.name == "env")):
        found = [one.value()] if one.option.name == "env" else _read_env_file(one)
        for name, value in found:
            if name in _OF_PLACE or name in _HAVE_A_FLAG:
                flag = _HAVE_A_FLAG.get(name)
                raise LaunchError(
                    f"{one}: {name} is set by ddplaunch", hint=f"type `{flag} {value}`" if flag else f"leave {name} out"
                )
            merged[name] = value
    return merged


def _read_env_file(given: Given) -> list[tuple[str, str]]:
    try:
        with open(given.value(), encoding="utf-8") as file:
            return variables(file.read(), given.text)
    except OSError as error:
        raise LaunchError(f"{given}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise LaunchError(f"{given}: the file is not UTF-8 text") from None
    except BadValue as error:
        raise LaunchError(str(error), hint="each line is NAME=VALUE, a # comment or empty") from None


def _settle(settled: dict[str, Settled], rivals: Rivals) -> None:
    """Drop the lower one of two rivals.

    Raises:
        LaunchError: neither is lower, and they say different things.
    """
    first, second = (settled.get(name) for name in rivals.names)
    if first is None or second is None:
        return
    if first.given.source != second.given.source:
        del settled[min(first, second, key=lambda one: one.given.source).given.option.name]
    elif not rivals.agree(first.value, second.value):
        raise LaunchError(f"{first.given} and {second.given} do not go together", hint=rivals.hint)


def _check_together(settled: Mapping[str, Settled]) -> None:
    forwarded, stopping = settled.get("forward_signals"), settled.get("signals_to_handle")
    stops = (
        stopping.value if stopping else ()
    )  # of those that stop by default, one that is to be forwarded no longer does
    if forwarded and (both := [signum.name for signum in forwarded.value if signum in stops]):
        raise LaunchError(
            f"{forwarded.given}: {both[0]} stops the job",
            hint=f"name the signals that stop it without {both[0]}: --signals-to-handle "
            + ",".join(signum.name for signum in stops if signum.name != both[0]),
        )
    standalone, nodes, endpoint = (settled.get(name) for name in ("standalone", "nnodes", "rdzv_endpoint"))
    if standalone and nodes and nodes.value[1] > 1:
        raise LaunchError(
            f"{standalone.given} and {nodes.given} do not go together",
            hint="--standalone means one node: leave one out",
        )
    # torchrun overrides any endpoint silently; one that names this machine does no harm
    if standalone and endpoint and endpoint.value and not _names_this_machine(endpoint.value):
        raise LaunchError(
            f"{standalone.given} and {endpoint.given} do not go together",
            hint="--standalone means one node, which meets nobody: leave one out",
        )


def _names_this_machine(endpoint: str) -> bool:
    return endpoint in _LOCAL_HOSTS or endpoint.rpartition(":")[0] in _LOCAL_HOSTS


def _program(settled: Mapping[str, Settled], words: Sequence[str]) -> Program:
    python = settled.get("python")
    kind = ProgramKind.SCRIPT
    if "module" in settled:
        kind = ProgramKind.MODULE
    elif "no_python" in settled and "run_path" not in settled:  # torchrun: --run-path wins
        kind = ProgramKind.COMMAND
    return Program(kind=kind, target=words[0], args=tuple(words[1:]), python=python.value if python else None)


def _remarks(settled: Mapping[str, Settled]) -> Iterable[str]:
    for one in settled.values():
        if one.given.option.no_effect:
            yield f"{one.given} has no effect: {one.given.option.no_effect}"
    backend = settled.get("rdzv_backend")
    if backend and backend.value.startswith("etcd"):
        yield f"{backend.given} has no effect: no etcd server is asked"
