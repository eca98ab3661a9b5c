"""The grammars of single values: text in, value out. Pure; knows neither the option nor the origin of a text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from signal import Signals

from ddplaunch.fields import NAME
from ddplaunch.spec import StreamChoice, Streams

MOST = 65536  # nodes of a job, and workers of a node
_LARGEST = 2**31 - 1  # ranks, counts and ports are C ints in torch
_UUID = r"(?:GPU|MIG)-[0-9A-Za-z/-]+"
VARIABLE = r"[A-Za-z_][0-9A-Za-z_]*"


class BadValue(ValueError):
    """What was expected instead of this text, with a hint if the intended value can be guessed."""

    def __init__(self, expected: str, *, hint: str | None = None) -> None:
        super().__init__(expected)
        self.hint = hint


_MOST_RANKS = 1 << 20  # in a range
_TO_FILES = "to have it in files type `--log-dir FOLDER`, and for what is shown `> FILE` at the end"


def one_of(*names: str) -> Callable[[str], str]:
    """Make the parser of a choice between these names."""

    def parse(text: str) -> str:
        if text not in names:
            raise BadValue(f"expected {quoted(names)}")
        return text

    return parse


def output(*names: str) -> Callable[[str], str]:
    """Make the parser of how output is shown; other programs' --output is a file."""
    choice = one_of(*names)

    def parse(text: str) -> str:
        if text not in names and _is_file(text):
            raise BadValue(f"expected {quoted(names)}", hint=_TO_FILES)
        return choice(text)

    return parse


def _is_file(text: str) -> bool:
    return "/" in text or "." in text


def quoted(names: Sequence[str]) -> str:
    """Write names as an enumeration: "a", "b" or "c"."""
    marked = [f'"{name}"' for name in names]
    return marked[0] if len(marked) == 1 else f"{', '.join(marked[:-1])} or {marked[-1]}"


def digits(text: str) -> int | None:
    """Return the number, None if the text is not one: int() would take "1_0", "+1" and the digits of other scripts as well."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else None


def number(low: int, high: int = _LARGEST) -> Callable[[str], int]:
    """Make the parser of a whole number in a range."""

    def parse(text: str) -> int:
        value = digits(text)
        if value is None or not low <= value <= high:
            raise BadValue(f"expected a number from {low}" + (f" to {high}" if high < _LARGEST else ""))
        return value

    return parse


def text(expected: str) -> Callable[[str], str]:
    """Make the parser that takes any text of printable characters but the empty one."""

    def parse(value: str) -> str:
        if not value.strip() or not value.isprintable():
            raise BadValue(expected)
        return value

    return parse


def name(value: str) -> str:
    """Take what can be the name of a folder on every file system."""
    if not re.fullmatch(NAME, value):
        raise BadValue("expected up to 128 letters, digits and any of _.+@-, not beginning with one of .+@-")
    return value


def path(value: str) -> str:
    """Take any path; whether it exists is not checked."""
    if not value or "\0" in value:
        raise BadValue("expected a path")
    return value


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
    if count is None:
        raise BadValue('expected a number, "gpu", "cpu" or "auto"')
    if count == 0:
        raise BadValue("a job has at least one worker")
    if count > MOST:
        raise BadValue(f"a node has at most {MOST} workers")
    return count


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
                hint=_TO_FILES if _is_file(value) else "type for example 0:3,1:2",
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
    """Read ranks and ranges of them, separated by commas."""
    found: set[int] = set()
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        low, high = digits(first), digits(last) if dash else digits(first)
        if low is None or high is None or not low <= high < low + _MOST_RANKS:
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
    """Parse names of modules, separated by commas."""
    names = tuple(name for name in value.split(",") if name)
    for one in names:
        if not all(part.isidentifier() for part in one.split(".")):
            raise BadValue(f"expected names of modules such as torch,numpy; {one!r} is none")
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
    found: list[Signals] = []
    for part in (piece.strip() for piece in value.split(",")):
        upper = part.upper()
        known = {
            key: signum
            for signum in Signals
            for key in (signum.name, signum.name.removeprefix("SIG"), str(int(signum)))
        }
        if upper not in known:
            raise BadValue(f'"{part}" is not a signal', hint="type names such as SIGTERM or USR1, separated by commas")
        if known[upper] in (Signals.SIGKILL, Signals.SIGSTOP, Signals.SIGCHLD, Signals.SIGALRM):
            raise BadValue(f"{known[upper].name} cannot be passed on", hint=f"leave {part} out")
        if known[upper] not in found:
            found.append(known[upper])
    return tuple(found)


def notices(value: str) -> tuple[Signals, ...]:
    """Read signals that may announce the end of a job; not those with another meaning to processes."""
    found = signals(value)
    for signum in found:
        if signum in (Signals.SIGCONT, Signals.SIGTSTP, Signals.SIGWINCH):
            raise BadValue(
                f"{signum.name} cannot announce the end", hint="name what your job asks Slurm for: USR1, TERM"
            )
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
    """Read NAME=VALUE.

    Raises:
        BadValue: it is not that.
    """
    name, equals, content = value.partition("=")
    if not re.fullmatch(VARIABLE, name) or "\0" in content:
        raise BadValue("expected NAME=VALUE")
    if not equals:
        raise BadValue(
            "expected NAME=VALUE",
            hint=f"type `{name}=...`; workers inherit the environment anyway",
        )
    return name, content
