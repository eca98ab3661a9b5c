"""`ddplaunch top`: the workers of a running job in a table that scrolls and sorts, asked for anew twice a second."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ddplaunch.record.run import Run
from ddplaunch.record.window import requests
from ddplaunch.record.window.questions import AskStatus
from ddplaunch.system.console.tables import Look, section, written
from ddplaunch.system.errors import LaunchError, say
from ddplaunch.system.exitcodes import OK, of_signal
from ddplaunch.system.process.apart import disk_watch_paused
from ddplaunch.tools.runs import choice, client, logs, talk
from ddplaunch.tools.runs.board import Board
from ddplaunch.tools.runs.find import heading, of_running

if TYPE_CHECKING:
    from ddplaunch.tools.runs.find import Known

_LOOK_EVERY = 0.5  # seconds from one look to the next
# of a core for this command, and for the agent: it looks less often where the job has many workers
_SHARE_OF_CORE = 0.02
_ANSWER_WITHIN = 0.5  # seconds that the nodes of the job have to answer
_KEYS = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"\x1b[5~": "page up", b"\x1b[6~": "page down",
    b"\x1b[H": "home", b"\x1b[1~": "home", b"\x1b[F": "end", b"\x1b[4~": "end", b"\x1b[D": "<", b"\x1b[C": ">",
}  # fmt: skip

_ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the alternate screen, and no cursor: xterm's ctlseqs
_KEY = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)


def show(env: Mapping[str, str], named: str | None) -> int:
    """Show the chosen job until the job ends or `q` is pressed; return the exit status.

    Raises:
        LaunchError: there is no terminal, or it is not clear which job is meant.
    """
    if not (os.isatty(0) and os.isatty(1)):
        raise LaunchError(
            "ddplaunch top needs a terminal, but stdin or stdout is none",
            hint="`ddplaunch ps` shows the same once, and needs none",
        )
    run = choice.choose_running(env, named, "top")
    look = Look.of_stdout(env)
    top = _Top(env, run, colour=look.colour)
    with suppress(KeyboardInterrupt), _screen() as screen:
        top.loop(screen)
    if top.has_ended:
        record = Run(run.folder) if run.folder else None
        say(f"{run.name} {record.how_it_ended if record is not None else 'has ended'}")
        if record is not None and record.first_failure:
            say(record.first_failure)
    return OK


class _Screen:
    """The alternate screen of the terminal, and its keys as they are pressed; the ordinary screen keeps what it shows."""

    def __init__(self) -> None:
        self._typed = termios.tcgetattr(0)  # how the terminal was

    def enter(self) -> None:
        """Take the terminal."""
        tty.setcbreak(0)
        _write(_ENTER)

    def leave(self) -> None:
        """Give it back as it was."""
        _write(LEAVE)
        termios.tcsetattr(0, termios.TCSADRAIN, self._typed)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Give the terminal to something else meanwhile."""
        self.leave()
        try:
            yield
        finally:
            self.enter()


@contextmanager
def _screen() -> Iterator[_Screen]:
    """Take the terminal, and give it back as it was at the end, at Ctrl-Z and at SIGTERM."""
    screen = _Screen()

    def suspend(*_: object) -> None:
        with screen.lent():
            os.kill(os.getpid(), signal.SIGSTOP)

    def end(signum: int, frame: object) -> None:
        raise SystemExit(of_signal(signum))

    handlers: dict[int, Callable[[int, Any], object]] = {
        signal.SIGTSTP: suspend,
        signal.SIGTERM: end,
        signal.SIGINT: signal.default_int_handler,
    }
    handlers_before = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    screen.enter()
    try:
        yield screen
    finally:
        screen.leave()
        for signum, handler in handlers_before.items():
            signal.signal(signum, handler)


class _Top:
    """The loop of `ddplaunch top`: it asks the job for the state of its workers (a look), shows the table, and waits for keys."""

    def __init__(self, env: Mapping[str, str], run: Known, *, colour: bool) -> None:
        """Prepare the table of this run."""
        assert run.replies is not None
        self._env = env
        self._run = run
        self._colour = colour
        self._path = run.replies.socket_path
        self._board = Board()
        self._asks_to_stop = False  # whether the last line asks if the job is to be stopped
        self.has_ended = False

    def loop(self, screen: _Screen) -> None:
        """Look and show until the job has ended, or `q` is pressed."""
        next_look_at, own_cpu = 0.0, 0.0  # monotonic seconds; CPU seconds that the last round took here
        while True:
            cpu_before = time.process_time()
            if (asked_at := time.monotonic()) >= next_look_at:
                still_runs = self._look()
                if not still_runs:
                    self.has_ended = True
                    return
                took = time.monotonic() - asked_at
                # an answer in time is taken for CPU time of the agent; a late one only says that some node does not answer
                agents_cpu = took if took < _ANSWER_WITHIN else 0.0
                # after such a pause looks have cost _SHARE_OF_CORE of the time
                next_look_at = time.monotonic() + max(
                    _LOOK_EVERY, own_cpu / _SHARE_OF_CORE, agents_cpu / _SHARE_OF_CORE
                )
            self._draw()
            own_cpu = time.process_time() - cpu_before
            for key in _keys(max(0.0, next_look_at - time.monotonic())):
                is_to_leave = self._on_key(key, screen)
                if is_to_leave:
                    return

    def _look(self) -> bool:
        """Ask the job for the state of its workers; return whether it still runs."""
        replies = client.ask(self._path, AskStatus(), _ANSWER_WITHIN)
        if replies is not None:
            self._board.on_replies(replies, time.monotonic())
        return replies is not None

    def _draw(self) -> None:
        width, height = os.get_terminal_size(1)
        question = (
            f"stop {heading(of_running(self._board.replies))}, as Ctrl-C does? y or n" if self._asks_to_stop else ""
        )
        shown = self._board.lines(width, height, question)
        text = written([section(*shown)], Look(self._colour, width))
        _write("\x1b[H" + text.replace("\n", "\x1b[K\r\n") + "\x1b[J")

    def _on_key(self, key: str, screen: _Screen) -> bool:
        """Do what a key asks for; return whether that is to leave."""
        if self._asks_to_stop:  # so the key is the answer
            self._asks_to_stop = False
            if key == "y":
                self._stop()
            return False
        rank = self._board.selected
        match key:
            case "q":
                return True
            case "k":
                self._asks_to_stop = True
            case "s":
                look = Look.of_stdout(self._env)
                self._off_screen(screen, lambda: print(talk.text_of_stacks(self._run, talk.WantedStacks(), look)))
            case "l" if rank is not None:
                self._off_screen(screen, lambda: _logs(self._env, self._run, rank))
            case "a" if rank is not None:
                self._off_screen(screen, lambda: talk.attach(self._env, self._run.run_id, str(rank)))
            case _:
                self._board.on_key(key)
        return False

    def _stop(self) -> None:
        """Ask the job to stop, and wait for no more than its first reply: the next looks show how it ends."""
        with suppress(OSError, LaunchError), self._path.connect() as sock:
            for _ in client.replies_of(sock, requests.StopRun(), _ANSWER_WITHIN):
                break

    def _off_screen(self, screen: _Screen, verb: Callable[[], object]) -> None:
        """Run a verb on the ordinary screen, where what it shows can be copied and stays."""
        with screen.lent():
            try:
                verb()
            except LaunchError as error:
                sys.stderr.write(error.render())
            sys.stdout.flush()
            with suppress(EOFError), disk_watch_paused():
                input("\n[Enter] goes back to ddplaunch top ")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _logs(env: Mapping[str, str], run: Known, rank: int) -> None:
    logs.show(env, run.run_id, logs.wanted(now=time.time(), ranks=str(rank)))


def _keys(within: float) -> list[str]:
    """Wait for keys so many seconds, and name those that were pressed; a terminal that is gone is as good as `q`."""
    ready, _, _ = select.select([0], [], [], within)
    if not ready:
        return []
    found = _KEY.findall(os.read(0, 1 << 10)) or [b"q"]
    return [_KEYS.get(key, key.decode(errors="replace")) for key in found]
