"""Which workers and which of their streams the console shows. Pure data."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum

from msgspec import Struct

# of terminals that open links; what does not know OSC 8 ignores it mostly, but some print it
_KNOW_LINKS = ("kitty", "ghostty", "foot", "alacritty", "wezterm", "contour")  # in TERM
_PROGRAMS = ("iTerm.app", "WezTerm", "vscode", "ghostty", "Hyper", "Tabby", "rio", "mintty")  # in TERM_PROGRAM
_VTE = 5000  # VTE_VERSION of GNOME's terminal and others since 2017


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

    terminals: frozenset[Stream]
    colour: frozenset[Stream]
    links: bool = False  # the terminal of stderr opens links
    live: frozenset[Stream] = frozenset()  # where progress bars are shown in place: the cursor of the terminal moves
    columns: int = 0  # of the terminal as the job began; 0: of unknown size
    lines: int = 0

    @property
    def text(self) -> str:
        """The terminals, colours and links in a word, for `of_text`; bars are not in it."""
        streams = (",".join(sorted(one.name for one in streams)) for streams in (self.terminals, self.colour))
        return ";".join((*streams, "links" if self.links else ""))

    @classmethod
    def of_text(cls, text: str) -> Screen:
        """Return the screen of another process, from its `text`."""
        *streams, links = text.split(";")
        terminals, colour = (frozenset(Stream[name] for name in names.split(",") if name) for names in streams)
        return cls(terminals=terminals, colour=colour, links=bool(links))

    @classmethod
    def here(cls, env: Mapping[str, str]) -> Screen:
        """Inspect our own stdout and stderr."""
        fds = ((Stream.OUT, 1), (Stream.ERR, 2))
        columns = lines = 0
        with suppress(OSError):  # it is no terminal
            columns, lines = os.get_terminal_size(2)
        terminals = frozenset(stream for stream, fd in fds if os.isatty(fd) and not _is_of_launcher(env, stream))
        return cls(
            terminals=terminals,
            colour=frozenset(stream for stream in Stream if use_colour(env, stream in terminals)),
            links=Stream.ERR in terminals and knows_links(env),
            # what reads a pipe, as tee does, may write to the same terminal: its lines and the bars would erase each other
            live=terminals if moves_cursor(env) and not any(is_pipe(fd) for _, fd in fds) else frozenset(),
            columns=columns,
            lines=lines,
        )


def _is_of_launcher(env: Mapping[str, str], stream: Stream) -> bool:
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
    """Whether the terminal is known to open links (OSC 8); tmux passes them on to one that may not be."""
    if "TMUX" in env or env.get("TERM", "").startswith(("screen", "tmux")):
        return False
    vte = env.get("VTE_VERSION", "")
    return (
        any(name in env.get("TERM", "") for name in _KNOW_LINKS)
        or env.get("TERM_PROGRAM") in _PROGRAMS
        or "WT_SESSION" in env
        or "KONSOLE_VERSION" in env
        or (vte.isdecimal() and int(vte) >= _VTE)
    )


def moves_cursor(env: Mapping[str, str]) -> bool:
    """Whether a terminal lets its cursor go up.

    A cell of a notebook is a terminal to what `!` starts in it, but knows carriage returns alone; Jupyter names the server of its
    kernel in JPY_PARENT_PID.
    """
    return env.get("TERM", "dumb") != "dumb" and "JPY_PARENT_PID" not in env
