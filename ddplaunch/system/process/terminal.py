"""Reads and restores the modes of our terminal (termios(3)), its size, and how processes stand to theirs. Touches no other."""

from __future__ import annotations

import os
from contextlib import suppress
from enum import Enum, auto
from typing import Any

_STDIN = 0
_READ_SYSCALLS = {"x86_64": 0, "aarch64": 63}  # the number of read(2)
_TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")
_UNKNOWN_SIZE = os.terminal_size((80, 24))  # of a serial line

Modes = list["Any"]  # as termios has them


def modes() -> Modes | None:
    """Return the modes of the terminal; None if stdin is no terminal, or another job of the shell has the terminal."""
    if not os.isatty(_STDIN):
        return None
    import termios  # an extension module that nothing else here needs

    try:
        return termios.tcgetattr(_STDIN) if os.tcgetpgrp(_STDIN) == os.getpgrp() else None
    except (OSError, termios.error):  # it is not our controlling terminal, or was closed
        return None


class Standing(Enum):
    """How a process stands to the terminal of its session."""

    NO_TERMINAL = auto()
    BACKGROUND = auto()  # another job of the shell has the terminal
    FOREGROUND = auto()  # keys such as Ctrl-C signal the process, but its stdin is no terminal
    KEYBOARD = auto()  # the same, and its stdin is a terminal


def standing(pid: int) -> Standing:
    """Return how a process, of whatever session, stands to its terminal; one that is gone has none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # proc(5): the name may hold anything
            fields = file.read().rpartition(b")")[2].split()
        group, terminal, foreground_group = fields[2], fields[4], fields[5]
        if terminal == b"0":
            return Standing.NO_TERMINAL
        if group != foreground_group:
            return Standing.BACKGROUND
        is_keyboard = os.readlink(f"/proc/{pid}/fd/{_STDIN}").startswith(_TERMINALS)
    except (OSError, IndexError):
        return Standing.NO_TERMINAL
    return Standing.KEYBOARD if is_keyboard else Standing.FOREGROUND


def size_of(fd: int) -> os.terminal_size | None:
    """Return the size of the terminal behind a descriptor; None if it is none, or another job of the shell has the terminal."""
    with suppress(OSError):  # it is not our controlling terminal, so no shell takes turns with us
        if os.tcgetpgrp(fd) != os.getpgrp():
            return None
    try:
        size = os.get_terminal_size(fd)
    except OSError:  # it was closed
        return None
    return size if size.lines and size.columns else _UNKNOWN_SIZE


def new_line(fd: int) -> str:
    """Return what begins a new line on this terminal where another program may have left one open; "" if it is no terminal.

    As many blanks as the terminal is wide go on in the next line, except from the beginning of a line, which they leave empty.
    """
    try:
        return " " * os.get_terminal_size(fd).columns + "\r"
    except OSError:
        return ""


def awaited_input(pid: int) -> str | None:
    """Return a text that stays the same while the main thread of a process waits in one read(2) of a terminal.

    None: it waits in none, or the system does not say so. The text is how often the thread has given up its CPU, which tells
    one such call from the next.
    """
    try:
        with open(f"/proc/{pid}/syscall") as file:  # proc(5): the number, then the arguments in hexadecimal
            number, fd, *_ = file.read().split()
        if int(number) != _READ_SYSCALLS.get(os.uname().machine):
            return None
        if not os.readlink(f"/proc/{pid}/fd/{int(fd, 16)}").startswith(_TERMINALS):
            return None
        with open(f"/proc/{pid}/status") as file:
            return next((line for line in file if line.startswith("voluntary_ctxt_switches:")), None)
    except (OSError, ValueError):  # it has ended, or runs
        return None


def set_modes(wanted: Modes | None) -> None:
    """Give the terminal these modes, unless it has them, or another job of the shell has the terminal."""
    now = modes()
    if wanted is None or now is None or now == wanted:
        return
    import termios

    with suppress(termios.error):
        termios.tcsetattr(_STDIN, termios.TCSANOW, wanted)
