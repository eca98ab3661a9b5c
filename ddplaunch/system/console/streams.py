"""Decides what the console shows: which workers and streams, on which terminals, in which colours, and each line's prefix."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum

from msgspec import Struct

from ddplaunch.system.words import compress

# of terminals that open links; what does not know OSC 8 ignores it mostly, but some print it
_TERMINALS_WITH_LINKS = ("kitty", "ghostty", "foot", "alacritty", "wezterm", "contour")  # in TERM
# in TERM_PROGRAM
_PROGRAMS_WITH_LINKS = ("iTerm.app", "WezTerm", "vscode", "ghostty", "Hyper", "Tabby", "rio", "mintty")
_FIRST_VTE_WITH_LINKS = 5000  # VTE_VERSION of GNOME's terminal and others since 2017


class Stream(Enum):
    """One of the two streams that a worker writes to and the command passes on."""

    OUT = "stdout"
    ERR = "stderr"


BOTH = frozenset(Stream)

Chunks = list[tuple[Stream, bytes]]  # what to write where, in this order


class ShownWorker(Struct, frozen=True, kw_only=True):
    """A worker of this node as the console shows it."""

    rank: int
    local_rank: int
    role: str = "default"  # torchrun's --role; only a prefix template names it, and the host
    host: str = ""
    streams: frozenset[Stream] = BOTH  # those that go to the console; empty: a hidden worker


class Written(Struct, frozen=True):
    """What a worker has written to its pipes."""

    seconds: float  # since the last of it
    size: int  # bytes
    last: str  # the last line, or state of a progress bar; of a long one the end


class Screen(Struct, frozen=True, kw_only=True):
    """The streams of the command's console: which are terminals, which get colours."""

    terminals: frozenset[Stream] = frozenset()
    colour: frozenset[Stream] = frozenset()
    links: bool = False  # the terminal of stderr opens links
    live: frozenset[Stream] = frozenset()  # where progress bars are shown in place: the cursor of the terminal moves
    has_rows: bool = False  # the rows of --live stand below the lines, which have to be whole
    columns: int = 0  # of the terminal as the job began; 0: of unknown size
    lines: int = 0

    @property
    def text(self) -> str:
        """The terminals, colours, links and rows in a word, for `of_text`; bars are not in it."""
        streams = (",".join(sorted(one.name for one in streams)) for streams in (self.terminals, self.colour))
        return ";".join((*streams, "links" if self.links else "", "rows" if self.has_rows else ""))

    @classmethod
    def of_text(cls, text: str) -> Screen:
        """Return the screen of another process, from its `text`."""
        *streams, links, rows = text.split(";")
        terminals, colour = (frozenset(Stream[name] for name in names.split(",") if name) for names in streams)
        return cls(terminals=terminals, colour=colour, links=bool(links), has_rows=bool(rows))

    @classmethod
    def here(cls, env: Mapping[str, str], *, has_rows: bool = False) -> Screen:
        """Inspect our own stdout and stderr; `has_rows`: a viewer shows rows of workers below the output."""
        fds = ((Stream.OUT, 1), (Stream.ERR, 2))
        # what reads a pipe, as tee does, may write to the same terminal: its lines and the bars would erase each other
        is_alone = not any(is_pipe(fd) for _, fd in fds)
        columns = lines = 0
        with suppress(OSError):  # it is no terminal
            columns, lines = os.get_terminal_size(2)
        # mpirun and srun make terminals that no person may see
        terminals = frozenset(stream for stream, fd in fds if os.isatty(fd) and not _may_be_of_launcher(env, stream))
        return cls(
            terminals=terminals,
            colour=frozenset(stream for stream in Stream if use_colour(env, stream in terminals)),
            links=Stream.ERR in terminals and knows_links(env),
            live=terminals if moves_cursor(env) and is_alone else frozenset(),
            has_rows=has_rows,
            columns=columns,
            lines=lines,
        )


def _may_be_of_launcher(env: Mapping[str, str], stream: Stream) -> bool:
    """Whether a terminal may be one that no person sees, which a launcher made so that a program writes at once.

    Open MPI makes one for the stdout of each process; `srun --unbuffered` for stdout and stderr, but not for stdin as `--pty`.
    """
    if "OMPI_COMM_WORLD_RANK" in env and stream is Stream.OUT:
        return True
    return "SLURM_STEP_ID" in env and not os.isatty(0)


def is_pipe(fd: int) -> bool:
    """Whether another process reads what is written here."""
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:  # it is closed
        return False


def use_colour(env: Mapping[str, str], isatty: bool) -> bool:
    """Whether to write colours to a stream.

    NO_COLOR beats FORCE_COLOR and CLICOLOR_FORCE, as in Python 3.13; these beat TERM=dumb and no terminal.
    Sources: no-color.org, force-color.org, bixense.com/clicolors.
    """
    if env.get("NO_COLOR"):
        return False
    if any(env.get(name, "") not in ("", "0", "false") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return isatty and env.get("TERM") != "dumb" and env.get("CLICOLOR") != "0"


def knows_links(env: Mapping[str, str]) -> bool:
    """Whether the terminal is known to open links (OSC 8). tmux passes links on, perhaps to a terminal that does not."""
    if "TMUX" in env or env.get("TERM", "").startswith(("screen", "tmux")):
        return False
    vte = env.get("VTE_VERSION", "")
    return (
        any(name in env.get("TERM", "") for name in _TERMINALS_WITH_LINKS)
        or env.get("TERM_PROGRAM") in _PROGRAMS_WITH_LINKS
        or "WT_SESSION" in env
        or "KONSOLE_VERSION" in env
        or (vte.isdecimal() and int(vte) >= _FIRST_VTE_WITH_LINKS)
    )


def moves_cursor(env: Mapping[str, str]) -> bool:
    """Whether a terminal lets its cursor go up, and its user wants things to move there: rich reads TTY_INTERACTIVE=0 as no.

    A cell of a notebook is a terminal to what `!` starts in it, but knows carriage returns alone; Jupyter names the server of its
    kernel in JPY_PARENT_PID.
    """
    return (
        env.get("TERM", "dumb") != "dumb"
        and "JPY_PARENT_PID" not in env
        and env.get("TTY_INTERACTIVE", "").strip() != "0"
    )


def rewraps_lines(env: Mapping[str, str]) -> bool:
    """Whether the terminal wraps its lines again when its width changes: most do, but xterm and the console of Linux cut them."""
    return "TMUX" in env or "STY" in env or not ("XTERM_VERSION" in env or env.get("TERM") == "linux")


ESCAPE = b"\x1b"
RESET = b"\x1b[m"

# the 16-colour codes that are readable on black and on white; red is left to errors, white, black, dark blue and the
# other bright ones vanish on one of the two; underlined, the same six serve the next six ranks
_HUES = ("36", "35", "32", "94", "33", "95")
STYLES = _HUES + tuple(f"4;{hue}" for hue in _HUES)
SEVERAL = "1"  # bold: a line of several ranks has no colour of its own

_MAX_CACHED = 1024  # prefixes of groups of ranks; a job that makes more of them computes some anew


class Prefix:
    """What stands before each line of one worker, or of several that wrote the same."""

    __slots__ = ("_newline_and_prefix", "coloured", "text")

    def __init__(self, text: bytes, style: str | None = None) -> None:
        """Take the text unchanged; `style` is an SGR code, None: no colour."""
        # the reset comes first so that no earlier output can colour the prefix
        self.text = text if style is None else b"\x1b[0;%bm%b%b" % (style.encode(), text, RESET)
        self._newline_and_prefix = b"\n" + self.text
        self.coloured = style is not None

    def add(self, block: bytes, before: bytes = b"") -> bytes:
        """Put the prefix before each line of a block of whole lines, and `before` (a time, or "") before the prefix."""
        if before:
            prefixed = self.add(block)[:-1]
            return b"".join((before, prefixed.replace(b"\n", b"\n" + before), b"\n"))
        if self.coloured and ESCAPE in block:
            # a colour that the worker left on would colour our next message or the shell's prompt
            lines = [line + RESET if ESCAPE in line else line for line in block[:-1].split(b"\n")]
            return b"".join((self.text, self._newline_and_prefix.join(lines), b"\n"))
        return b"".join((self.text, block[:-1].replace(b"\n", self._newline_and_prefix), b"\n"))


def without_torchs(rank: int, block: bytes) -> bytes:
    """Take the rank away that torch's excepthook puts before each line of a traceback: ours is there already."""
    torchs = b"[rank%d]: " % rank
    if torchs not in block:
        return block
    return block.removeprefix(torchs).replace(b"\n" + torchs, b"\n")


class Prefixes:
    """The prefixes of a job on one stream, for any group of its ranks.

    Texts behind prefixes begin in one column: the padding is after the bracket, so that `[3] ` finds rank 3
    in a job of any size. A template makes the text alone, without padding, as torchrun's does (string.Template;
    role_name, rank, local_rank, hostname; unknown names stay; empty: none).
    """

    def __init__(
        self, workers: Sequence[ShownWorker], *, colour: bool, template: str | None, highest: int, together: bool
    ) -> None:
        """Prepare for these workers; `highest` is the job's last rank, `together` that ranks may share a prefix."""
        self._workers = {worker.rank: worker for worker in workers}
        self._colour = colour
        self._template = template
        widest = [f"[{highest}]", f"[{compress(self._workers)}]" if together else ""]
        self._width = max(map(len, widest))
        self._made: dict[tuple[int, ...], Prefix] = {}

    def of(self, ranks: tuple[int, ...]) -> Prefix:
        """The prefix of these ranks; ascending."""
        found = self._made.get(ranks)
        if found is None:
            if len(self._made) >= _MAX_CACHED:
                self._made.clear()
            found = self._made[ranks] = self._make(ranks)
        return found

    def _make(self, ranks: tuple[int, ...]) -> Prefix:
        style = STYLES[ranks[0] % len(STYLES)] if len(ranks) == 1 else SEVERAL
        return Prefix(self._text(ranks).encode("utf-8", "surrogateescape"), style if self._colour else None)

    def _text(self, ranks: tuple[int, ...]) -> str:
        """Return the prefix of these ranks: "[0-3] ", or as the template says."""
        if not self._template:
            return f"[{compress(ranks)}]".ljust(self._width) + " "
        from string import Template  # compiles regular expressions that few jobs need

        return Template(self._template).safe_substitute(
            role_name=self._workers[ranks[0]].role,
            rank=compress(ranks),
            local_rank=compress(self._workers[rank].local_rank for rank in ranks),
            hostname=self._workers[ranks[0]].host,
        )
