"""Makes a JobSpec of the options that were given: which values win, which contradict each other.

Inspects no machine; reads the files of --env-file and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import eq
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.spec.job import Given, JobSpec, Program, ProgramKind, Source, default
from ddplaunch.spec.options.parsers import MOST, VARIABLE, BadValue, duration
from ddplaunch.spec.options.table import ALIAS_OF, BY_NAME, Reach
from ddplaunch.spec.options.token import VARIABLE as TOKEN
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.words import did_you_mean, why_failed

_LARGEST_ENV_FILE = 1 << 20  # characters of a file of variables
# these differ from worker to worker: one value for all would be wrong for all but one
_VARIABLES_OF_PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE",
             "ROLE_RANK", "ROLE_WORLD_SIZE")  # fmt: skip
_HAVE_A_FLAG = {"MASTER_ADDR": "--master-addr", "MASTER_PORT": "--master-port", "ROLE_NAME": "--role"}
_FIELDS = frozenset(JobSpec.__struct_fields__)
# keys of --rdzv-conf with an effect, besides those that _timeouts takes out
_RDZV_KEYS_WITH_EFFECT = ("last_call_timeout", "is_host")
_RDZV_KEYS_OF_HEARTBEAT = ("heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt")
# what some torch since 2.4 reads there (torch/distributed/elastic/rendezvous)
_RDZV_KEYS = ("timeout", "join_timeout", "close_timeout", "read_timeout", "store_type", "use_libuv", "rank", "protocol", "cert",
              "key", "cacert", "ssl_cert", "ssl_cert_key", "ca_cert", "etcd_prefix", *_RDZV_KEYS_WITH_EFFECT,
              *_RDZV_KEYS_OF_HEARTBEAT)  # fmt: skip
_LOCAL_HOSTS = {"localhost", "127.0.0.1", "[::1]", "::1"}
_MORE_THAN_ANY = 1 << 32  # workers: no job has as many

# a line of a file of variables
_ESCAPED_CHARACTER = r'\\(["\\$`n])'
_DOUBLE_QUOTED = r'"((?:[^"\\]|\\.)*)"\s*(?:#.*)?'
_SINGLE_QUOTED = r"'([^']*)'\s*(?:#.*)?"


class Resolved(Struct, frozen=True, kw_only=True):
    """A value that has taken precedence, with what was written."""

    given: Given
    value: Any


def job_spec(given: Iterable[Given], program: Sequence[str], remarks: Sequence[str] = ()) -> JobSpec:
    """Resolve what was given, in any order, into the job that runs `program`: SCRIPT and its arguments.

    `remarks` are sentences for the user, such as the names of files that were ignored.

    Raises:
        LaunchError: a value is not valid, or two of them do not go together.
    """
    given = sorted(given, key=lambda one: one.source)
    # of --env and --env-file each counts, of all other options one
    of_variables = [one for one in given if BY_NAME[one.name].target == "env"]
    env, origins_of_secrets = _environment(of_variables)
    resolved = _winners(one for one in given if BY_NAME[one.name].target != "env")
    _drop_one_of_exclusive_options(resolved)
    _drop_one_of_contradicting_values(resolved)
    timeouts = _timeouts(resolved)
    _check_together(resolved)
    if not program:
        raise LaunchError(
            "there is no SCRIPT to run", hint="ddplaunch [OPTIONS] SCRIPT [ARGS]...; see ddplaunch --help"
        )
    values, origins = _fields(resolved)
    if env:
        origins["env"] = ", ".join(dict.fromkeys(one.origin for one in of_variables))
    for name, timeout in timeouts.items():
        values[name], origins[name] = timeout.seconds, timeout.origin
    return JobSpec(
        program=_program(resolved, program),
        env=tuple(env.items()),
        origins_of_secrets=origins_of_secrets,
        origins=origins,
        given=tuple(resolved[name].given for name in BY_NAME if name in resolved),
        remarks=(*remarks, *_remarks(resolved)),
        **values,
    )


def _winners(given: Iterable[Given]) -> dict[str, Resolved]:
    """Return the value of each option that wins: the last one, where the sources stand in ascending order."""
    last = {one.name: one for one in given}
    resolved = {
        name: Resolved(given=one, value=BY_NAME[name].value(one))
        for name, one in last.items()
        if one.text or not BY_NAME[name].may_be_empty  # an empty text of such an option means that it is not given
    }
    for name in [name for name, one in resolved.items() if one.value is False]:
        del resolved[name]  # a variable or a file has set the flag to 0
    return resolved


def _fields(resolved: Mapping[str, Resolved]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of the JobSpec, and the origin of each.

    Raises:
        LaunchError: the job has too many nodes, its spares (nodes that wait to take the place of another) included.
    """
    # by field; some options set none, such as --quiet
    fields = {field: one for name, one in resolved.items() if (field := BY_NAME[name].target) in _FIELDS}
    origins = {name: one.given.origin for name, one in fields.items()}
    values = {name: one.value for name, one in fields.items()}
    if "keep_warm" in values and "start_method" not in values:
        values["start_method"], origins["start_method"] = "forkserver", origins["keep_warm"]
    if "nnodes" in values and (spares := values.get("spares")):
        least, most = values["nnodes"]
        if most + spares > MOST:
            raise LaunchError(f"{resolved['spares'].given}: a job has at most {MOST} nodes, its spares included")
        values["nnodes"] = least, most + spares  # it also begins without its spares
    if "max_restarts" in values:  # "3/1h" is both
        values["max_restarts"], values["restart_window"] = values["max_restarts"]
    values["verbosity"] = ("verbose" in resolved) - ("quiet" in resolved)
    return values, origins


def sent(spec: JobSpec, reach: Reach) -> list[Given]:
    """Return the options that reach these other agents of the job, as they were given.

    The workers' variables are not among them: they may be secret, and travel apart.
    """
    return [one for one in spec.given if BY_NAME[one.name].reach >= reach]


def received(given: Iterable[Given], program: Sequence[str], variables: Iterable[tuple[str, str, str]]) -> JobSpec:
    """Resolve the options that an agent was sent into the job.

    `variables` are those of the workers: the name, the value and the file that each is from, "" if it was typed.
    """
    for_env = []
    for name, value, from_file in variables:
        typed = Given.typed("env", f"{name}={value}")
        for_env.append(replace(typed, source=Source.FILE, origin=from_file) if from_file else typed)
    return job_spec([*given, *for_env], program)


def _environment(given: Sequence[Given]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the workers' variables, and of those that come from files the origins: their values are shown nowhere.

    Those of files come first, since --env wins over --env-file, whichever is later.
    """
    merged: dict[str, str] = {}
    origins_of_secrets: dict[str, str] = {}
    for one in sorted(given, key=lambda one: (one.source, one.name == "env")):
        found = [BY_NAME["env"].value(one)] if one.name == "env" else _read_env_file(one)
        is_from_file = one.name == "env_file" or one.source <= Source.FILE  # the latter: of a configuration file
        for name, value in found:
            _check_variable(name, value, one)
            merged[name] = value
            origins_of_secrets.pop(name, None)
            if is_from_file:
                origins_of_secrets[name] = one.origin
    return merged, origins_of_secrets


def _check_variable(name: str, value: str, given: Given) -> None:
    """Refuse a variable for the workers that ddplaunch sets itself, or that no worker may have."""
    if name == TOKEN:  # the message must not show its value
        raise LaunchError(
            f"{given.origin}: {TOKEN} is a secret that workers do not get",
            hint=f"set {TOKEN} where you call ddplaunch, or put the secret into a file: --token-file FILE",
        )
    if name in _VARIABLES_OF_PLACE or name in _HAVE_A_FLAG:
        flag = _HAVE_A_FLAG.get(name)
        raise LaunchError(
            f"{given}: {name} is set by ddplaunch", hint=f"type `{flag} {value}`" if flag else f"leave {name} out"
        )


def _read_env_file(given: Given) -> list[tuple[str, str]]:
    """Return the variables in the file of --env-file, in order."""
    from ddplaunch.system.process.files import read_text  # few jobs have one

    try:
        return variables_of_file(read_text(BY_NAME["env_file"].value(given), _LARGEST_ENV_FILE), given.text)
    except OSError as error:
        raise LaunchError(f"{given}: {why_failed(error)}") from None
    except UnicodeDecodeError:
        raise LaunchError(f"{given}: the file is not UTF-8 text") from None
    except BadValue as error:
        raise LaunchError(str(error), hint="each line is NAME=VALUE, a # comment or empty") from None


def variables_of_file(content: str, place: str) -> list[tuple[str, str]]:
    """Read lines of NAME=VALUE as a shell would: `#` comments, `export `, single and double quotes.

    Raises:
        BadValue: a line is not one; the text names `place` and the line.
    """
    found = []
    for count, line in enumerate(content.split("\n"), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        name, equals, rest = re.sub(r"^export\s+", "", stripped).partition("=")
        if not equals or not re.fullmatch(VARIABLE, name) or "\0" in rest:
            raise BadValue(f"{place}:{count}: expected NAME=VALUE")
        found.append((name, _unquoted(rest, f"{place}:{count}")))
    return found


def _unquoted(text: str, place: str) -> str:
    """Return the value of a line of an env file without its quotes or comment; `place` names the line in errors."""
    mark = text[:1]
    if mark not in ("'", '"'):
        return re.sub(r"(?:^|\s)#.*", "", text).strip()
    found = re.fullmatch(_DOUBLE_QUOTED if mark == '"' else _SINGLE_QUOTED, text)
    if not found:
        raise BadValue(f"{place}: the quote {mark} is not closed, or something follows it")
    if mark == "'":
        return found[1]
    return re.sub(_ESCAPED_CHARACTER, lambda escape: "\n" if escape[1] == "n" else escape[1], found[1])


class _Timeout(NamedTuple):
    seconds: float
    origin: str


def _timeouts(resolved: dict[str, Resolved]) -> dict[str, _Timeout]:
    """Return the timeouts in torchrun's --rdzv-conf, by the field of JobSpec; --rdzv-timeout from a nearer source wins.

    The timeout of the rendezvous is taken out of `resolved["rdzv_conf"]`.

    Raises:
        LaunchError: a key is misspelled, or --rdzv-timeout from the same source says something else.
    """
    conf, ours, backend = (resolved.get(name) for name in ("rdzv_conf", "rdzv_timeout", "rdzv_backend"))
    if conf is None:
        return {}
    for key in conf.value:
        if key not in _RDZV_KEYS and (meant := did_you_mean(key, _RDZV_KEYS, cutoff=0.8)):
            raise LaunchError(f"{conf.given}: torchrun knows no {key}", hint=f"did you mean {meant}?")
    found: dict[str, _Timeout] = {}
    # torchrun's static rendezvous reads "timeout", the others "join_timeout"
    is_static = backend is None or backend.value == "static"
    join_keys = ("timeout", "join_timeout") if is_static else ("join_timeout", "timeout")
    if key := next((key for key in join_keys if key in conf.value), None):
        join = duration(conf.value[key])
        if ours is None or ours.given.source < conf.given.source:
            found["rdzv_timeout"] = _Timeout(join, conf.given.origin)
        elif ours.given.source == conf.given.source and ours.value != join:
            raise LaunchError(
                f"{ours.given} and {key}={conf.value[key]} in {conf.given} do not go together",
                hint="both say how long the nodes wait for each other: leave one out",
            )
    if last_call := conf.value.get("last_call_timeout"):
        found["last_call"] = _Timeout(duration(last_call), conf.given.origin)
    rest = {key: value for key, value in conf.value.items() if key not in join_keys}
    resolved["rdzv_conf"] = Resolved(given=conf.given, value=rest)
    return found


# --- which options go together

# two options that mean the same thing or exclude each other, and what to do about it
_EXCLUSIVE = (
    ("grace_period", "shutdown_timeout", "both say how long a stop may take: leave one out"),
    ("gpus_per_worker", "workers_per_gpu", "a worker has several GPUs, or several workers share one: leave one out"),
    ("virtual_local_rank", "pin", "--virtual-local-rank shows each worker its own device only: leave --pin out"),
    ("cpu_bind", "numa_binding", "both bind the workers to CPUs: leave one out"),
    ("quiet", "verbose", "leave one out"),
    ("debug", "debug_on_error", "each gives the terminal to one rank, from its start or when it fails: leave one out"),
    ("live", "debug", "a debugger has the terminal and the keyboard: leave one out"),
    ("live", "debug_on_error", "a debugger has the terminal and the keyboard: leave one out"),
    ("debugpy", "debug", "a rank has one debugger: leave one out"),
    ("debugpy", "debug_on_error", "a rank has one debugger: leave one out"),
    ("no_python", "debugpy", "debugpy is for Python: --no-python runs a command"),
    ("no_python", "debug_on_error", "the debugger is one for Python: --no-python runs a command"),
    ("timestamps", "output", "raw output is shown as it is: leave one out"),
    ("module", "no_python", "a module is run by python: leave one out"),
    ("module", "run_path", "SCRIPT is a module's name or a file's path: leave one out"),
    ("no_python", "python", "a command is run without an interpreter: leave one out"),
    ("mps", "simulate", "each simulated node would start MPS for the same GPUs: leave one out"),
    ("no_python", "sharing_strategy", "the strategy is set inside python: --no-python runs a command"),
    ("keep_warm", "start_method", "what is kept warm forks the workers: leave one out"),
    ("hosts", "hostfile", "both say which hosts there are: leave one out"),
    ("include", "exclude", "name the hosts to use or those not to use: leave one out"),
    ("simulate", "hosts", "all simulated nodes are on this machine: leave one out"),
    ("simulate", "hostfile", "all simulated nodes are on this machine: leave one out"),
    ("simulate", "node_rank", "all simulated nodes are on this machine: leave one out"),
    ("simulate", "cluster", "all simulated nodes are on this machine: leave --cluster out"),
    ("hosts", "cluster", "on hosts that you name, agents are started over ssh: leave one out"),
    ("hosts", "node_rank", "hosts that you name have ranks in their order: leave one out"),
    ("standalone", "hosts", "--standalone means one node, this one: leave one out"),
    ("hostfile", "cluster", "on hosts that you name, agents are started over ssh: leave one out"),
    ("hostfile", "node_rank", "hosts that you name have ranks in their order: leave one out"),
    ("standalone", "hostfile", "--standalone means one node, this one: leave one out"),
)
# values with which two of these go together all the same
_AGREE: dict[tuple[str, str], Callable[[Any, Any], Any]] = {
    ("grace_period", "shutdown_timeout"): eq,
    ("virtual_local_rank", "pin"): lambda _, pin: pin == "visible",
    ("cpu_bind", "numa_binding"): lambda cpu_bind, _: cpu_bind == "none",
    ("timestamps", "output"): lambda _, output: output != "raw",
    ("keep_warm", "start_method"): lambda _, method: method == "forkserver",
    ("simulate", "cluster"): lambda _, cluster: cluster == "local",
    ("hosts", "cluster"): lambda _, cluster: cluster == "ssh",
    ("hostfile", "cluster"): lambda _, cluster: cluster == "ssh",
}


def _drop_one_of_exclusive_options(resolved: dict[str, Resolved]) -> None:
    """Drop, of two options that exclude each other, the one from the lower source; LaunchError if both are from one."""
    for *names, hint in _EXCLUSIVE:
        first, second = (resolved.get(name) for name in names)
        if first is None or second is None:
            continue
        if (agree := _AGREE.get((names[0], names[1]))) and agree(first.value, second.value):
            continue
        _drop_one(resolved, first, second, hint)


def _drop_one_of_contradicting_values(resolved: dict[str, Resolved]) -> None:
    """Drop, of two options whose values exclude each other, the one from the lower source; LaunchError if both are from one."""
    standalone, no_control = resolved.get("standalone"), resolved.get("no_control")
    nodes, endpoint = resolved.get("nnodes"), resolved.get("rdzv_endpoint")
    restarts, requeue_on, spares = resolved.get("max_restarts"), resolved.get("requeue_on"), resolved.get("spares")
    min_nodes, max_nodes = nodes.value if nodes else default("nnodes")
    has_several_nodes = max_nodes > 1 or "hosts" in resolved or "hostfile" in resolved
    # torchrun overrides any endpoint silently; one that names this machine does no harm
    is_elsewhere = endpoint and not {endpoint.value, endpoint.value.rpartition(":")[0]} & _LOCAL_HOSTS
    max_restarts, _window = restarts.value if restarts else (0, None)
    restarts_together = max_restarts > 0 and has_several_nodes
    has_spares = spares and spares.value
    for first, second, contradicts, why in (
        (standalone, nodes, max_nodes > 1, "--standalone means one node"),
        (standalone, endpoint, is_elsewhere, "--standalone means one node, without a rendezvous"),
        (no_control, nodes, min_nodes < max_nodes, "without a control channel nodes cannot agree on their number"),
        (no_control, restarts, restarts_together, "without a control channel nodes cannot restart together"),
        (no_control, spares, has_spares, "without a control channel no node can take the place of another"),
        (standalone, spares, has_spares, "--standalone means one node"),
        (no_control, requeue_on, True, "without a control channel no node knows when all workers have exited"),
    ):
        if first is None or second is None or not contradicts:
            continue
        # one of them may have been dropped because of a third
        if first.given.name in resolved and second.given.name in resolved:
            _drop_one(resolved, first, second, f"{why}: leave one out")


def _drop_one(resolved: dict[str, Resolved], first: Resolved, second: Resolved, hint: str) -> None:
    """Drop, of two options that do not go together, the one from the lower source; LaunchError if both are from one."""
    if first.given.source == second.given.source:
        raise LaunchError(f"{first.given} and {second.given} do not go together", hint=hint)
    del resolved[min(first, second, key=lambda one: one.given.source).given.name]


def _check_together(resolved: Mapping[str, Resolved]) -> None:
    """Refuse values that contradict each other, whichever sources they come from."""
    forwarded, handled = resolved.get("forward_signals"), resolved.get("signals_to_handle")
    # only those of --signals-to-handle: a signal that stops the job by default may be forwarded instead
    stops = handled.value if handled else ()
    if forwarded and (both := [signum.name for signum in forwarded.value if signum in stops]):
        raise LaunchError(
            f"{forwarded.given}: {both[0]} stops the job",
            hint=f"name the signals that stop it without {both[0]}: --signals-to-handle "
            + ",".join(signum.name for signum in stops if signum.name != both[0]),
        )
    if "wrap" not in resolved and (ranks := resolved.get("wrap_ranks")):
        raise LaunchError(f"{ranks.given}: no worker is wrapped", hint="add --wrap COMMAND, or leave --wrap-ranks out")
    if chaos := resolved.get("chaos"):
        _check_faults(chaos, resolved)


def _check_faults(chaos: Resolved, resolved: Mapping[str, Resolved]) -> None:
    """Refuse faults of --chaos whose ranks and nodes the job will not have, as far as the options say how many it has."""
    if "simulate" not in resolved:
        raise LaunchError(f"{chaos.given}: faults are injected into simulated nodes only", hint="add --simulate")
    _, max_nodes = resolved["nnodes"].value if "nnodes" in resolved else default("nnodes")
    per_node = resolved["nproc_per_node"].value if "nproc_per_node" in resolved else None
    # without a number, only the nodes will find out how many workers they have
    workers = max_nodes * per_node if isinstance(per_node, int) else _MORE_THAN_ANY
    nodes = max_nodes + (resolved["spares"].value if "spares" in resolved else 0)
    for fault in chaos.value:
        kind, number = ("node", nodes) if fault.kind == "node" else ("rank", workers)
        if fault.target >= number:
            raise LaunchError(
                f"{chaos.given}: there is no {kind} {fault.target}, since the job has {number}",
                hint="ranks count from 0; --nnodes and --nproc-per-node say how many there are",
            )


def _program(resolved: Mapping[str, Resolved], arguments: Sequence[str]) -> Program:
    kind = ProgramKind.MODULE if "module" in resolved else ProgramKind.SCRIPT
    if "no_python" in resolved and "run_path" not in resolved:  # torchrun: --run-path wins
        kind = ProgramKind.COMMAND
    python = resolved["python"].value if "python" in resolved else None
    return Program(kind=kind, target=arguments[0], args=tuple(arguments[1:]), python=python)


def _remarks(resolved: Mapping[str, Resolved]) -> Iterable[str]:
    """Yield a note on each option that has no effect here, or was written as another launcher writes it."""
    for one in resolved.values():
        if (alias := ALIAS_OF.get(one.given.origin)) is not None:
            yield f"{one.given}, as {alias.launcher} writes it, is taken as {BY_NAME[one.given.name].flag}"
        if why := BY_NAME[one.given.name].why_no_effect:
            yield f"{one.given} has no effect: {why}"
    values = {name: one.value for name, one in resolved.items()}
    has_fork_server = "keep_warm" in values or values.get("start_method") == "forkserver"
    backend = values.get("rdzv_backend") or ""
    min_nodes, max_nodes = values.get("nnodes", default("nnodes"))
    max_restarts, _ = values.get("max_restarts", (0, None))
    # a job also begins again without a node that is lost, if it may have fewer or if a spare takes the place
    may_restart = min_nodes < max_nodes or max_restarts > 0 or bool(values.get("spares"))
    how_often = "--max-restarts says how often workers that fail are started again"
    for name, has_no_effect, why in (
        ("preload", not has_fork_server, "only --start-method forkserver imports anything before the workers"),
        ("start_method", values.get("start_method") == "fork", "every worker is a fresh process"),
        ("max_requeues", "requeue_on" not in values, "--requeue-on says after which signals a job is requeued"),
        ("max_no_progress", not may_restart and "requeue_on" not in values, how_often),
        ("restart_on", not may_restart, how_often),
        ("rdzv_backend", backend.startswith("etcd"), "etcd is not used"),
    ):
        if name in resolved and has_no_effect:
            yield f"{resolved[name].given} has no effect: {why}"
    for key in [key for key in values.get("rdzv_conf", ()) if key not in _RDZV_KEYS_WITH_EFFECT]:
        says_when_lost = "--heartbeat-timeout says when a node is lost"
        why = says_when_lost if key in _RDZV_KEYS_OF_HEARTBEAT else "torch's rendezvous is not used"
        yield f"{key} in {resolved['rdzv_conf'].given} has no effect: {why}"
