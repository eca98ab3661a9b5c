"""Says what a field of a message may hold: types that a receiver checks, and what makes a value of ours fit for them. Pure.

Names and hosts are those that the options take. Texts of programs are bounded only: what is shown is filtered where it is shown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

BACKENDS = ("nccl", "gloo", "mpi", "xccl", "ucc")
RESTART_KINDS = (
    "node-lost",
    "killed",
    "cuda",
    "nccl",
    "timeout",
    "hang",
    "import",
    "exception",
    "exit",
)  # of --restart-on
NAME = r"[0-9A-Za-z_][0-9A-Za-z_.+@-]{0,127}"
# within brackets: control characters, those that change the direction or have no width, halves of characters
UNPRINTABLE = r"\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff"
# what a terminal obeys: a movement, a title, a link, a colour, also where its end is missing; and colours alone
TERMINAL_ESCAPE = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-~])?"
COLOUR = r"\x1b\[[0-9;:]*m"
NOT_IN_HOSTS = rf"{UNPRINTABLE}\s\[\]/@,"  # within brackets
HOST = f"[^{NOT_IN_HOSTS}]+"
_LARGEST = 2**31 - 1
_LARGEST_SIZE = 2**63 - 1
_LONGEST_DURATION = 1e12
_SLOWEST, _FASTEST = 1e-9, 1e9  # steps in a second
_LINE = 1000  # characters
_TEXT = 200_000
_HOST = 255
_VALUE = 16  # bytes that one value among others takes
_FREE = 1 << 20  # bytes that any message may take

Number = Annotated[int, Meta(ge=0, le=_LARGEST)]
Size = Annotated[int, Meta(ge=0, le=_LARGEST_SIZE)]  # bytes
Term = Annotated[int, Meta(ge=0, le=_LARGEST_SIZE)]  # of a generation, as in DDPLAUNCH_TERM
Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]  # of a clock
Duration = Annotated[float, Meta(ge=0, le=_LONGEST_DURATION)]  # seconds
Pace = Annotated[float, Meta(ge=_SLOWEST, le=_FASTEST)]  # steps in a second
Port = Annotated[int, Meta(ge=1, le=65535)]
Signal = Annotated[int, Meta(ge=1, le=64)]
SignalOrNone = Annotated[int, Meta(ge=0, le=64)]  # 0: no signal
Status = Annotated[int, Meta(ge=0, le=255)]
Workers = Annotated[int, Meta(ge=1, le=65536)]  # of one node
Name = Annotated[str, Meta(pattern=rf"\A{NAME}\Z")]  # also that of a folder
Host = Annotated[str, Meta(max_length=_HOST, pattern=rf"\A{HOST}\Z")]
HostOrNone = Annotated[str, Meta(max_length=_HOST, pattern=rf"\A(?:{HOST})?\Z")]  # "": none
Backend = Annotated[str, Meta(pattern=rf"\A(?:{'|'.join(BACKENDS)})\Z")]
Keyword = Annotated[str, Meta(max_length=40, pattern=r"\A[a-z_]+\Z")]
Line = Annotated[str, Meta(max_length=_LINE, pattern=rf"\A[^{UNPRINTABLE}]*\Z")]  # of printable characters
Piece = Annotated[str, Meta(max_length=_LINE)]  # of what a program says
Text = Annotated[str, Meta(max_length=_TEXT)]

MAX_AGENTS = 65536
MAX_RANKS = 2**31 - 1  # of a job; ranks are C ints in torch


Buffer = bytes | memoryview


class Malformed(Exception):
    """What has arrived is no message of ours: why, in printable characters."""


def decoder(kind: Any) -> Callable[[Buffer], Any]:
    """Return the decoder for messages of a type, which raises nothing but `Malformed`, whatever arrives."""
    decode: Callable[[Buffer], Any] | None = None

    def checked(payload: Buffer) -> Any:
        """Return the message in `payload`, checked; the decoder is made at the first call."""
        nonlocal decode
        if decode is None:  # making one takes milliseconds, and no process receives messages of all types
            decode = msgspec.json.Decoder(kind).decode
        try:
            return decode(payload)
        # RecursionError: nested too deeply; UnicodeDecodeError: text that is not UTF-8
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            reason = re.sub("Expected `str` matching regex '.*'", "unexpected text", str(error))
            raise Malformed(line(reason)) from None

    return checked


def check_density(data: bytes | bytearray, start: int = 0, *, container: int = 80, times: int = 8) -> None:
    """Refuse JSON, from `start` on, whose values would take many `times` the memory of its text, as a million empty lists do.

    `container` is what a list or an object takes, in bytes. Cheap next to decoding, and done before anything is made.

    Raises:
        Malformed: it is so dense.
    """
    taken = container * (data.count(b"[", start) + data.count(b"{", start)) + _VALUE * data.count(b",", start)
    if taken > times * (len(data) - start) + _FREE:
        raise Malformed(f"holds too many values for {len(data) - start} bytes")


def line(text: str) -> str:
    """Make a text fit for a `Line`: what does not print, and what is no UTF-8 in a path, becomes a question mark."""
    return re.sub(f"[{UNPRINTABLE}]", "?", text[:_LINE])


def clean(text: str) -> str:
    """Return a text without terminal escapes; other characters that do not print become U+FFFD. Newlines and tabs stay."""
    if text.isprintable():
        return text
    return re.sub(rf"(?![\t\n])[{UNPRINTABLE}]", "\ufffd", re.sub(TERMINAL_ESCAPE, "", text))


def piece(text: str, limit: int = _LINE) -> str:
    """Make a text of a program fit for a `Piece`: JSON cannot carry lone surrogates, which stand for bytes that are no UTF-8."""
    return text[:limit].encode(errors="replace").decode()


def text(text: str, limit: int = _TEXT) -> str:
    """Make a text fit for a `Text`, in the same way."""
    return piece(text, limit)


def host(name: str) -> str:
    """Make the name of a host fit for a `Host`."""
    return re.sub(f"[{NOT_IN_HOSTS}]", "?", name[:_HOST]) or "?"


def bounded_number(value: int) -> int:
    """Make a number that a program wrote fit for a `Number`."""
    return max(0, min(value, _LARGEST))


def bounded_size(value: int) -> int:
    """Make a number that a program wrote fit for a `Size`."""
    return max(0, min(value, _LARGEST_SIZE))


def bounded_pace(steps_per_second: float | None) -> float | None:
    """Make a pace fit for a `Pace`; None where there is none."""
    is_one = steps_per_second is not None and _SLOWEST <= steps_per_second <= _FASTEST
    return steps_per_second if is_one else None


def bounded_duration(seconds: float) -> float:
    """Make seconds that follow from what a program wrote fit for a `Duration`; 0 for no number."""
    return 0.0 if math.isnan(seconds) else max(0.0, min(seconds, _LONGEST_DURATION))
