"""A real terminal for the tests: the command, or a shell with job control in which it is typed, under a pseudo-terminal."""

import ctypes
import os
import shlex
import signal
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pexpect

from tests.conftest import PATIENCE, Job, until
from tests.emulator import Emulator
from tests.nodes import catches

CTRL_A, CTRL_C, CTRL_D, CTRL_Z, CTRL_BACKSLASH = "\x01", "\x03", "\x04", "\x1a", "\x1c"
ENTER, TAB, UP = "\r", "\t", "\x1b[A"
PROMPT = "type> "


class Terminal:
    """What a user has before them: the keys they press and what the screen shows."""

    def __init__(
        self,
        job: Job,
        argv: list[str],
        env: dict[str, str] | None = None,
        rows: int = 24,
        columns: int = 80,
        spawn: Callable[..., Any] = pexpect.spawn,
    ) -> None:
        for name in ("state", "tmp", "signs"):
            (job.home / name).mkdir(exist_ok=True)
        # the prompt is then written as it is, without the sequences that announce pasted text
        inputrc = job.home / "inputrc"
        inputrc.write_text("set enable-bracketed-paste off\n")
        plain = {name: value for name, value in job.env.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        # HOME: the files that pdb, readline and the shell read are not the developer's
        own = {"TERM": "xterm", "HOME": str(job.home), "INPUTRC": str(inputrc)}
        self._job = job
        self.child = spawn(
            argv[0],
            argv[1:],
            env={**plain, **own, **(env or {})},
            cwd=str(job.home),
            dimensions=(rows, columns),
            timeout=PATIENCE,
            encoding="utf-8",
        )
        self.child.delaybeforesend = None

    def press(self, *keys: str) -> None:
        """Type."""
        self.child.send("".join(keys))

    def sees(self, *texts: str) -> str:
        """Wait until each of these, one after another, has come; give what came before the last of them."""
        for text in texts:
            self.child.expect_exact(text)
        return str(self.child.before)

    def status(self) -> int:
        """Wait for the end of the command and give its exit status."""
        self.sees_the_end()
        assert self.child.exitstatus is not None, f"killed by signal {self.child.signalstatus}"
        return int(self.child.exitstatus)

    def sees_the_end(self) -> str:
        """Wait for the end of the command; give all that came until then."""
        self.child.expect(pexpect.EOF)
        self.child.wait()
        return str(self.child.before)

    def cooks(self) -> bool:
        """Whether the terminal hands on whole lines, as it does while nobody edits one."""
        return bool(termios.tcgetattr(self.child.child_fd)[3] & termios.ICANON)

    def hang_up(self) -> None:
        """Close the terminal."""
        os.close(self.child.child_fd)


def typed(job: Job, *args: object, **options: object) -> Terminal:
    """The command as the terminal's own program: it leads the session."""
    return Terminal(job, job.argv(*args), **options)  # type: ignore[arg-type]


class Lasting(Terminal):
    """The command in a session that goes on after it: the system resets the modes of a terminal when its session has ended."""

    def __init__(self, job: Job, *args: object, **options: Any) -> None:
        stays = 'trap : INT; "$@"; status=$?; read _; exit $status'
        super().__init__(job, ["sh", "-c", stays, "sh", *job.argv(*args)], **options)

    def sees_the_end(self) -> str:
        """Wait until the command has given the terminal its modes back, and for the end of all; give what came until then."""
        until(self.cooks, "the modes of the terminal")
        self.press(ENTER)
        return super().sees_the_end()


class Screen:
    """What is on the terminal's screen."""

    def __init__(self, terminal: Terminal, columns: int) -> None:
        self._terminal = terminal
        self._emulator = Emulator(24, columns)

    def until(self, has: Callable[[list[str]], bool]) -> list[str]:
        """Wait for a screen like this, and give it."""
        by = time.monotonic() + PATIENCE
        while not has(self._emulator.shown):
            assert time.monotonic() < by, self._emulator.shown
            try:
                self._emulator.feed(self._terminal.child.read_nonblocking(1 << 16, timeout=0.5))
            except pexpect.TIMEOUT:
                pass
        return self._emulator.shown

    def resize(self, lines: int, columns: int, writer: int) -> None:
        """Give the terminal another size while this process is held, so that nothing is on its way to the screen."""
        with held(writer):
            try:
                while True:
                    self._emulator.feed(self._terminal.child.read_nonblocking(1 << 16, timeout=0))
            except pexpect.TIMEOUT:
                pass
            self._terminal.child.setwinsize(lines, columns)
            self._emulator.resize(columns)

    def at_end(self) -> list[str]:
        """What the command leaves."""
        self._emulator.feed(self._terminal.sees_the_end())
        return self._emulator.shown


def watched(job: Job, *args: object, at_half: Callable[[], object] = lambda: None) -> tuple[list[str], bytes]:
    """Run programs/bars_of on a terminal: its bars move in place. Give the screen that is left, and all logs in one."""
    terminal = typed(job, *args, columns=100)
    screen = Screen(terminal, 100)
    half = screen.until(lambda rows: any("15/30" in row for row in rows[-2:]))
    assert max(map(len, half)) > 60  # not tqdm's ten columns
    at_half()
    (job.home / "signs" / "go").touch()
    shown = screen.at_end()
    assert terminal.child.exitstatus == 0, shown
    assert any("30/30" in row for row in shown)
    logs = b"".join(path.read_bytes() for path in sorted((job.home / "state").rglob("rank-*.*")) if path.is_file())
    assert b"\x1b" not in logs
    return shown, logs


class Shell(Terminal):
    """An interactive bash in which the command is typed."""

    def __init__(self, job: Job, env: dict[str, str] | None = None, **options: Any) -> None:
        own = {"PS1": PROMPT, "HISTFILE": "", **(env or {})}
        super().__init__(job, ["bash", "--norc", "--noprofile", "-i"], own, **options)
        self.sees(PROMPT)

    def types(self, line: str) -> None:
        """Type a line."""
        self.press(line, ENTER)
        self.sees("\r\n")  # the echo, so that what is seen from here on is the answer

    def runs(self, *args: object, after: str = "") -> None:
        """Type the command with these arguments."""
        self.types(shlex.join(self._job.argv(*args)) + after)

    def says(self, line: str) -> str:
        """Type a line and give its answer."""
        self.types(line)
        return self.sees(PROMPT).strip()

    def leave(self) -> None:
        """End the shell."""
        self.press("exit", ENTER)
        self.sees_the_end()


def child(pid: int) -> int:
    """The last child of a process as soon as there is one."""
    return int(until(Path(f"/proc/{pid}/task/{pid}/children").read_text, "a child").split()[-1])


def agent_of(pid: int) -> int:
    """The agent of a front: its last child once the front handles signals, since children that ask a disk come before."""
    until(lambda: catches(Path(f"/proc/{pid}"), signal.SIGTERM), "a front that handles signals")
    return child(pid)


@contextmanager
def held(pid: int) -> Iterator[None]:
    """Keep a process from doing anything, as if the machine were busy: ptrace(2), since SIGCONT would tell it something."""
    attach, detach = 16, 17
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    assert ptrace(attach, pid, None, None) == 0, os.strerror(ctypes.get_errno())
    os.waitpid(pid, 0)
    try:
        yield
    finally:
        ptrace(detach, pid, None, None)


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on, proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def stopped(pids: list[int]) -> bool:
    """Whether all of these processes are stopped."""
    return all(stat(pid)[0] == "T" for pid in pids)


def running(pids: list[int]) -> bool:
    """Whether none of these processes is stopped."""
    return all(stat(pid)[0] in "RSD" for pid in pids)
