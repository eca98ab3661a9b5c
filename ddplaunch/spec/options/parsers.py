"""The grammars of single values: text in, value out. Pure; knows neither the option nor the origin of a text."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Sequence
from signal import Signals

from ddplaunch.spec.job import Fault, StreamChoice, Streams
from ddplaunch.system.fields import HOST, NAME, RESTART_KINDS

MOST = 65536  # nodes of a job, and workers of a node
_LARGEST_NUMBER = 2**31 - 1  # ranks, counts and ports are C ints in torch
_UUID = r"(?:GPU|MIG)-[0-9A-Za-z/-]+"
VARIABLE = r"[A-Za-z_][0-9A-Za-z_]*"


class BadValue(ValueError):
    """What was expected instead of this text, with a hint if the intended value can be guessed, or an example of this kind."""

    def __init__(self, expected: str, *, hint: str | None = None, example: str | None = None) -> None:
        super().__init__(expected)
        self.hint = hint
        self.example = example


_MOST_IN_RANGE = 1 << 20  # in a range


def one_of(*names: str, hint: Callable[[str], str | None] = lambda _: None) -> Callable[[str], str]:
    """Make the parser of a choice between these names; `hint` gives what to type in place of another text."""

    def parse(text: str) -> str:
        if text not in names:
            raise BadValue(f"expected {quoted(names)}", hint=hint(text))
        return text

    return parse


def hint_if_file(text: str) -> str | None:
    """Return the hint for a file where ddplaunch has none, as other programs take one for --output; None for other texts."""
    hint = "to have it in files type `--log-dir FOLDER`, and for what is shown `> FILE` at the end"
    return hint if "/" in text or "." in text else None


def quoted(names: Sequence[str]) -> str:
    """Write names as an enumeration: "a", "b" or "c"."""
    marked = [f'"{name}"' for name in names]
    return marked[0] if len(marked) == 1 else f"{', '.join(marked[:-1])} or {marked[-1]}"


def digits(text: str) -> int | None:
    """Return the number, None if the text is not one: int() would take "1_0", "+1" and the digits of other scripts as well."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else None


def number(low: int, high: int = _LARGEST_NUMBER) -> Callable[[str], int]:
    """Make the parser of a whole number in a range."""

    def parse(text: str) -> int:
        value = digits(text)
        if value is None or not low <= value <= high:
            raise BadValue(f"expected a number from {low}" + (f" to {high}" if high < _LARGEST_NUMBER else ""))
        return value

    return parse


def text(expected: str) -> Callable[[str], str]:
    """Make the parser that takes any text of printable characters but the empty one."""

    def parse(value: str) -> str:
        if not value.strip() or not value.isprintable():
            raise BadValue(expected)
        return value

    return parse


def matching(pattern: str, expected: str) -> Callable[[str], str]:
    """Make the parser that takes any text of this pattern; `expected` says what that is."""

    def parse(value: str) -> str:
        if not re.fullmatch(pattern, value, re.DOTALL):
            raise BadValue(f"expected {expected}")
        return value

    return parse


# the name of a folder on every file system
name = matching(NAME, "up to 128 letters, digits and any of _.+@-, not beginning with one of .+@-")
path = matching(r"[^\0]+", "a path")  # whether it exists is not checked
command_line = matching(r"(?=.*\S)[^\0]+", "a command of the shell")

WRAP_NAMES = ("run", "rank", "local_rank", "node_rank", "host")


def wrapper(value: str) -> tuple[str, ...]:
    """Read a command that starts another one: `strace -o {run}/{rank}` gives ("strace", "-o", "{run}/{rank}")."""
    import shlex  # few jobs are wrapped
    from string import Formatter

    try:
        words = tuple(shlex.split(value))
        # of each word: (literal text, name in braces or None, format, conversion)
        fields = [field for word in words for _, *field in Formatter().parse(word)]
    except ValueError as error:
        raise BadValue(f"expected a command ({str(error).lower()}); in it, write {{{{ for a brace") from None
    if not words:
        raise BadValue("expected a command")
    for name, form, conversion in fields:
        if name is not None and (name not in WRAP_NAMES or form or conversion):
            names = ", ".join(f"{{{known}}}" for known in WRAP_NAMES)
            raise BadValue(f"there is no {{{name}}}; there are {names}, and {{{{ is a brace")
    return words


def switch(value: str) -> bool:
    """Read a flag's value from a variable or a setting; torchrun reads 1 and 0, and letters in --rdzv-conf."""
    match value.lower():
        case "1" | "true" | "t" | "yes" | "y" | "on":
            return True
        case "0" | "false" | "f" | "no" | "n" | "off":
            return False
    raise BadValue("expected 1 or 0")


def nproc_per_node(value: str) -> int | str:
    """Read the number of workers: a number, or what to count."""
    if value == "xpu":  # torchrun's word for Intel GPUs
        return "gpu"
    if value in ("gpu", "cpu", "auto"):
        return value
    count = digits(value)
    if count is None or not 1 <= count <= MOST:
        raise BadValue(f'expected a number from 1 to {MOST}, "gpu", "cpu" or "auto"')
    return count


def restarts(value: str) -> tuple[int, float | None]:
    """Read how many restarts are allowed, and in which time if that is given: 3, or 3/1h."""
    most, slash, window = value.partition("/")
    if not slash:
        return number(0)(value), None
    try:
        return number(1)(most), positive_duration(window)
    except BadValue:
        raise BadValue("expected a number, or a number and a time above zero such as 3/1h", example="3/1h") from None


def restart_on(value: str) -> frozenset[str]:
    """Read kinds of failures, between commas."""
    one = one_of(*RESTART_KINDS)
    return frozenset(one(part.strip()) for part in value.split(","))


def positive_number(value: str) -> float:
    """Read a number above zero, with or without a point."""
    try:
        found = float(value)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise BadValue("expected a number above zero")
    return found


def streams(value: str) -> StreamChoice:
    """Read torchrun's 0 to 3 for all local ranks, or LOCAL_RANK:0-3,... for some."""
    masks = {str(stream.value): stream for stream in Streams}
    if value in masks:
        return StreamChoice(default=masks[value])
    chosen: dict[int, Streams] = {}
    for part in value.split(","):
        local_rank, _, mask = part.partition(":")
        rank = digits(local_rank)
        if rank is None or mask not in masks:
            raise BadValue(
                "expected 0 (nothing), 1 (stdout), 2 (stderr), 3 (both), or one of these for some local ranks",
                hint=hint_if_file(value) or "type for example 0:3,1:2",
            )
        if rank in chosen:
            raise BadValue(f"local rank {rank} is listed twice")
        chosen[rank] = masks[mask]
    return StreamChoice(by_local_rank=chosen)


def local_ranks(value: str) -> frozenset[int]:
    """Read local ranks, separated by commas."""
    ranks = [digits(part.strip()) for part in value.split(",")]
    if None in ranks:
        raise BadValue("expected local ranks such as 0,1,2")
    return frozenset(rank for rank in ranks if rank is not None)


def ranks(value: str) -> frozenset[int]:
    """Read ranks and ranges, separated by commas: "0,4-7"."""
    found: set[int] = set()
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        low, high = digits(first), digits(last) if dash else digits(first)
        if low is None or high is None or not low <= high < low + _MOST_IN_RANGE:
            raise BadValue("expected ranks such as 0,4-7")
        found.update(range(low, high + 1))
    return frozenset(found)


def needles(value: str) -> tuple[str, ...]:
    """Read texts separated by commas; a comma in a text is doubled."""
    found = tuple(part.replace("\0", ",") for part in value.replace(",,", "\0").split(","))
    if "" in found:
        raise BadValue("an empty text between the commas would match every line")
    return found


def modules(value: str) -> tuple[str, ...]:
    """Read names of modules, separated by commas."""
    names = tuple(name for name in value.split(",") if name)
    if wrong := [one for one in names if not all(part.isidentifier() for part in one.split("."))]:
        raise BadValue(f"expected names of modules such as torch,numpy; {wrong[0]!r} is none")
    return names


def devices(value: str) -> tuple[str, ...]:
    """Read device indices and GPU-/MIG- UUIDs, separated by commas, in the order in which they are to be used; or "cpu"."""
    if value.strip() == "cpu":
        return ("cpu",)
    found: list[str] = []
    for part in value.split(","):
        index = digits(part.strip())
        token = part.strip() if index is None else str(index)
        if index is None and not re.fullmatch(_UUID, token):
            raise BadValue("expected device indices or UUIDs such as 0,2 or GPU-8932f937, or cpu")
        if token in found:
            raise BadValue(f"device {token} is listed twice")
        found.append(token)
    return tuple(found)


def signals(value: str) -> tuple[Signals, ...]:
    """Read signals by name, with or without SIG, or by number, separated by commas."""
    known = {name: signum for signum in Signals for name in (signum.name, signum.name[3:], str(int(signum)))}
    found: list[Signals] = []
    for part in map(str.strip, value.split(",")):
        signum = known.get(part.upper())
        if signum is None:
            raise BadValue(f'"{part}" is not a signal', hint="type names such as SIGTERM or USR1, separated by commas")
        # no process can catch the first two; the others come by themselves, of a child that ends and of a timer
        if signum in (Signals.SIGKILL, Signals.SIGSTOP, Signals.SIGCHLD, Signals.SIGALRM):
            raise BadValue(f"{signum.name} cannot be passed on", hint=f"leave {part} out")
        if signum not in found:
            found.append(signum)
    return tuple(found)


def notices(value: str) -> tuple[Signals, ...]:
    """Read signals that may announce the end of a job; not those with another meaning to processes."""
    found = signals(value)
    if other := [signum.name for signum in found if signum in (Signals.SIGCONT, Signals.SIGTSTP, Signals.SIGWINCH)]:
        raise BadValue(f"{other[0]} cannot announce the end", hint="name what your job asks Slurm for: USR1, TERM")
    return found


def init_method(value: str) -> str:
    """Read env, tcp or file:PATH; torch's env:// and file:///PATH mean the same."""
    if value in ("env", "env://"):
        return "env"
    if value == "tcp":
        return value
    if value.startswith("file:") and (place := value.removeprefix("file:").removeprefix("//")):
        return f"file:{place}"
    if value.startswith("tcp://"):
        raise BadValue('expected "env", "tcp" or file:PATH', hint="the address is --master-addr and --master-port")
    raise BadValue('expected "env", "tcp" or file:PATH')


def variable(value: str) -> tuple[str, str]:
    """Read NAME=VALUE."""
    name, equals, content = value.partition("=")
    if not re.fullmatch(VARIABLE, name) or "\0" in content:
        raise BadValue("expected NAME=VALUE")
    if not equals:
        inherited = "expected NAME=VALUE; workers inherit the variables of this shell anyway"
        raise BadValue(inherited, example=f"{name}=...")
    return name, content


_TOO_MANY_MILLISECONDS = 30 * 365 * 24 * 3600 * 1000  # milliseconds; far above, floats cannot hold them exactly
_DURATION = r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})(?:\.(\d{1,3}))?s)?(?:(\d{1,9})ms)?"
_SECONDS = r"(\d{1,9})(?:\.(\d{1,3}))?"


def duration(value: str) -> float:
    """Read a time as seconds: 90, 1.5, 90s, 15m, 2h, 1h30m, 2d, 500ms."""
    if found := re.fullmatch(_SECONDS, value):
        parts = ("0", "0", "0", *found.groups(), "0")  # no days, hours and minutes, and no milliseconds
    elif value and (found := re.fullmatch(_DURATION, value)):
        parts = found.groups()
    else:
        raise BadValue("expected seconds, or a time such as 90s, 15m or 1h30m")
    *whole, decimals, extra_milliseconds = parts
    days, hours, minutes, seconds = (int(part or 0) for part in whole)
    thousandths = int((decimals or "").ljust(3, "0"))  # "5" of 1.5 is 500
    whole_seconds = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    milliseconds = whole_seconds * 1000 + thousandths + int(extra_milliseconds or 0)  # integers: the sum is exact
    if milliseconds >= _TOO_MANY_MILLISECONDS:
        raise BadValue("expected less than 30 years")
    return milliseconds / 1000


def positive_duration(value: str) -> float:
    """Read a time above zero as seconds."""
    seconds = duration(value)
    if not seconds:
        raise BadValue("expected a time above zero")
    return seconds


def duration_from_1s(value: str) -> float:
    """Read a time of at least a second as seconds."""
    seconds = duration(value)
    if seconds < 1:
        raise BadValue("expected at least 1s")
    return seconds


def duration_or_off(value: str) -> float:
    """Read a time of at least a second as seconds, and "off" as 0."""
    return 0.0 if value == "off" else duration_from_1s(value)


_ENDPOINT = r"(?:\[[\w.:%-]+\]|[\w.-]+)(?::(\d{1,5}))?|[\w.%-]*:[\w.%-]*:[\w.:%-]*"  # the last: bare IPv6
_FAULT_KINDS = ("kill", "node", "hang", "slow")
_FAULT_FORM = r"([a-z]+):(\d{1,9})@(.+)"
_FAULT_HINT = "type for example kill:5@2s: what, the rank, and the time after the start"


def nnodes(value: str) -> tuple[int, int]:
    """Read N or MIN:MAX."""
    low, colon, high = value.partition(":")
    min_nodes, max_nodes = digits(low), digits(high if colon else low)
    if not min_nodes or not max_nodes:
        raise BadValue("expected a number of nodes, or MIN:MAX")
    if max_nodes > MOST:
        raise BadValue(f"a job has at most {MOST} nodes")
    if min_nodes > max_nodes:
        raise BadValue("MIN exceeds MAX", example=f"{max_nodes}:{min_nodes}")
    return min_nodes, max_nodes


def write_nnodes(nodes: tuple[int, int]) -> str:
    """Write the minimum and maximum number of nodes as they are typed: 2 or 2:4."""
    min_nodes, max_nodes = nodes
    return str(max_nodes) if min_nodes == max_nodes else f"{min_nodes}:{max_nodes}"


def host(value: str) -> str:
    """Read a host name or an address without a port; an IPv6 address may be in brackets, as in torchrun."""
    bare = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    if bare.count(":") == 1:
        raise BadValue("expected a host without a port", hint="the port has an option of its own: --master-port")
    if not re.fullmatch(HOST, bare):
        raise BadValue("expected a host name or an address")
    return bare


def endpoint(value: str) -> str:
    """Check HOST, HOST:PORT or [IPV6]:PORT."""
    found = re.fullmatch(_ENDPOINT, value)
    if not found or int(found[1] or 0) > 65535:
        raise BadValue("expected HOST or HOST:PORT")
    return value


def rendezvous_settings(value: str) -> dict[str, str]:
    """Read torchrun's KEY=VALUE,KEY=VALUE and check those that have an effect here; is_host becomes 1 or 0."""
    # quotes that the shell has left, since they begin inside a word of it: --rdzv-conf="'join_timeout=60'"
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    result: dict[str, str] = {}
    for part in (value[1:-1] if is_quoted else value).split(","):
        key, _, content = (piece.strip() for piece in part.partition("="))
        if not key or not content:
            raise BadValue("expected KEY=VALUE,KEY=VALUE")
        result[key] = content
    parsers = {"join_timeout": positive_duration, "timeout": positive_duration, "last_call_timeout": duration}
    for key, parse in {**parsers, "is_host": switch}.items():
        if key in result:
            try:
                found = parse(result[key])
            except BadValue as error:
                raise BadValue(f"{key}: {error}", example=f"{key}={'1' if key == 'is_host' else '60'}") from None
            if key == "is_host":
                result[key] = str(int(found))
    return result


def faults(value: str) -> tuple[Fault, ...]:
    """Read faults of --chaos, separated by commas: "kill:3@10s,node:1@20s"."""
    faults = []
    for part in map(str.strip, value.split(",")):
        found = re.fullmatch(_FAULT_FORM, part, re.ASCII)
        if not found:
            raise BadValue(f'"{part}" is not KIND:RANK@TIME', hint=_FAULT_HINT)
        kind, target, after = found.groups()
        if kind not in _FAULT_KINDS:
            raise BadValue(f'"{part}": expected {quoted(_FAULT_KINDS)}', hint=_FAULT_HINT)
        try:
            faults.append(Fault(kind=kind, target=int(target), after=duration(after)))
        except BadValue as error:
            raise BadValue(f'"{part}": {error}', hint=_FAULT_HINT) from None
    return tuple(faults)


def is_numeric(address: str) -> bool:
    """Whether this is an IPv4 or IPv6 address and not a name."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.inet_pton(family, address.partition("%")[0])
    except (OSError, ValueError):
        return False
    return True
