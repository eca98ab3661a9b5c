"""--live at the front: rows about the job stand below the lines, and keys belong to ddplaunch.

A process of its own, the viewer, makes the rows, and gives the terminal its modes back if the front is killed. What the two say
to each other is in `record/window/rows.py`; the front alone writes. Lines that come close together, and the rows below them, are
one write.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import termios
import time
from collections.abc import Callable
from functools import partial

from ddplaunch.launcher.node.front import FrontOutput
from ddplaunch.reach.pipes import BARS, CONTROL, MESSAGE, SOCKET, STDERR
from ddplaunch.record.window.rows import LONGEST, Draw, encode, for_front
from ddplaunch.system.fields import Malformed
from ddplaunch.system.process.fork import fork
from ddplaunch.system.process.linux import detach, signal_at_end_of
from ddplaunch.system.process.terminal import Modes, modes, set_modes

View = Callable[[socket.socket], None]  # draws the rows, until the socket ends; see record/window/rows.py

_EVERY = 1.0  # seconds from one request for rows to the next
_PACE = 0.05  # seconds from one drawing to the next
_MOST = 1 << 16  # bytes that are held so long
_SILENT = 10.0  # seconds without rows after which the old ones are not shown any more
_KEYBOARD = 0
_HELP = "ddplaunch: t or Enter shows where the ranks are, Ctrl-C stops the job, Ctrl-Z pauses it, h shows these keys\n"
_LOST = "ddplaunch: --live has ended, since the process that makes its rows is gone. The job goes on\n"


class LiveOutput(FrontOutput):
    """Where the agent's messages go while rows about the job stand below them."""

    def __init__(self, view: View, *, rewraps: bool) -> None:
        """`view` runs in a process of its own; `rewraps` as in StatusArea."""
        super().__init__(rewraps=rewraps)
        self._view = view
        self._before = modes()  # what the terminal gets back; None: no keys
        self._keys: Modes | None = None  # the modes while the keyboard is ours
        self._viewer: socket.socket | None = None
        self._place = b""  # of the run's socket
        self._held: list[tuple[bytes, bytes]] = []  # what is to be written: stream and data
        self._size = 0  # bytes of that
        self._drawn_at = 0.0
        self._is_old = False  # the rows have changed since they were drawn
        self._next = 0.0  # when to ask the viewer for rows
        self._asked_at: float | None = None  # when the viewer was asked, if it has not replied
        self._poll = select.poll()

    def show(self, reader: socket.socket) -> None:
        """Write all messages of the agent until the agent ends, with the rows below them."""
        self._open_area()
        self._poll.register(reader, select.POLLIN)
        buffer = bytearray(MESSAGE + 1)
        try:
            while True:
                ready = self._wait()
                if reader.fileno() in ready:
                    if not (size := reader.recv_into(buffer)):
                        break
                    self._take(bytes(buffer[:1]), bytes(buffer[1:size]))
                if self._viewer is not None and self._viewer.fileno() in ready:
                    self._on_reply(self._viewer)
                if _KEYBOARD in ready:
                    self._on_keys()
                self._update()
            self._flush(draws=False)
            self._erase_area()
        finally:
            self.give_back()

    def _wait(self) -> set[int]:
        """Wait until there is something to do; return the descriptors that can be read."""
        until = [self._next] if self._viewer is not None and self._asked_at is None else []
        if self._asked_at is not None:
            until.append(self._asked_at + _SILENT)
        if self._held or self._is_old:
            until.append(self._drawn_at + _PACE)
        timeout = max(0.0, min(until) - time.monotonic()) * 1000 if until else None
        return {fd for fd, _ in self._poll.poll(timeout)}

    def _take(self, stream: bytes, data: bytes) -> None:
        """Take a message of the agent; lines for the terminal are held for a moment."""
        if stream == SOCKET:
            self._look_at(data)
        elif stream == BARS:
            self._take_bars(data)
            self._is_old = True
        elif stream != CONTROL:
            self._held.append((stream, data))
            self._size += len(data)

    def _update(self) -> None:
        """Ask for rows if it is time, clear the rows of a viewer that does not reply, and write what is held or drawn."""
        now = time.monotonic()
        if self._viewer is not None:
            if now >= self._next and self._asked_at is None:
                self._take_keyboard()
                self._ask(now)
            elif self._asked_at is not None and now >= self._asked_at + _SILENT:
                self._show_rows([])
                self._asked_at = now
        draws = (self._held or self._is_old) and now >= self._drawn_at + _PACE
        if draws or self._size >= _MOST:
            self._flush(draws=bool(draws))

    def _flush(self, *, draws: bool) -> None:
        """Write what is held, and draw the rows below it: one write for what goes to one stream."""
        area, size = self._area, self._terminal_size()
        parts: list[tuple[bytes, bytes]] = []
        for stream, data in self._held:
            shown = area.write(data, size) if area is not None and stream in self._terminals else data
            parts.append((stream, shown))
        self._held, self._size = [], 0
        if draws and area is not None:
            parts.append((self._terminals[-1], area.draw(size)))
            self._drawn_at, self._is_old = time.monotonic(), False
        together: list[tuple[bytes, list[bytes]]] = []
        for stream, data in parts:
            if not together or together[-1][0] != stream:
                together.append((stream, []))
            together[-1][1].append(data)
        for stream, pieces in together:
            self._write(stream, memoryview(b"".join(pieces)))

    # --- the process that makes the rows

    def _look_at(self, place: bytes) -> None:
        """Show rows about the run whose socket is at this place; after another place, the run is the same."""
        self._place = place
        if self._viewer is None:
            self._start_viewer()

    def _start_viewer(self) -> None:
        """Start the process that makes the rows, and take the keyboard; without the terminal's modes there are no keys."""
        if self._area is None:
            return
        keys = self._keys = _for_keys(self._before)
        before, front = self._before, os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            if fork() == 0:
                try:
                    signal.set_wakeup_fd(-1)
                    detach(theirs.fileno(), _KEYBOARD)
                    restore = partial(_restore, 4, before, keys)
                    _call_at_end_of(front, restore)
                    try:
                        self._view(socket.socket(fileno=3))
                    finally:
                        restore()
                finally:
                    os._exit(0)
        except OSError:  # the machine is at a limit
            ours.close()
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if ours.fileno() >= 0:
            self._viewer = ours
            self._poll.register(ours, select.POLLIN)

    def _ask(self, now: float, *, snapshot: bool = False) -> None:
        """Ask for rows or for a snapshot, of the terminal's size; not while another job of the shell has the terminal."""
        self._next = now + _EVERY
        size = self._terminal_size()
        if self._viewer is None or size is None:
            return
        try:
            self._viewer.send(encode(Draw(self._place, size.columns, size.lines, snapshot)), socket.MSG_DONTWAIT)
        except OSError:  # it is full, or has ended, which is then read
            return
        if not snapshot:
            self._asked_at = now

    def _on_reply(self, viewer: socket.socket) -> None:
        """Show rows, or a part of a snapshot; do without a viewer that has ended, or says what none of ours does."""
        try:
            data = viewer.recv(LONGEST, socket.MSG_DONTWAIT)
            reply = for_front(data) if data else None
        except BlockingIOError:
            return
        except (OSError, Malformed):
            reply = None
        if reply is None:
            self._end_rows()
            if not self.agent_has_ended:  # which ends this process too
                self._hold(_LOST.encode())
        elif reply.snapshot:
            self._hold(reply.text.encode())
        else:
            self._asked_at = None
            self._show_rows(reply.text.split("\n"))

    def _end_rows(self) -> None:
        """Show no rows any more, and give the keyboard back."""
        if self._viewer is not None:
            self._poll.unregister(self._viewer)
            self._viewer.close()
            self._viewer = self._asked_at = None
            self._show_rows([])
            self._leave_keyboard()
            self.give_back()

    def _show_rows(self, rows: list[str]) -> None:
        if self._area is not None:
            self._area.show_live(rows)
            self._is_old = True

    def _hold(self, text: bytes) -> None:
        """Have a text of ours written above the rows."""
        self._take(STDERR, text)

    # --- keys

    def _take_keyboard(self) -> None:
        """Have keys come as they are pressed, while the shell has put us into its foreground."""
        if self._keys is not None and modes() is not None:
            set_modes(self._keys)
            self._poll.register(_KEYBOARD, select.POLLIN)
        elif self._keys is not None:
            self._leave_keyboard()

    def _leave_keyboard(self) -> None:
        try:
            self._poll.unregister(_KEYBOARD)
        except KeyError:  # it was not ours
            pass

    def _on_keys(self) -> None:
        """Do what the keys ask for that were pressed."""
        if modes() is None:  # in the background, to read would stop us
            self._leave_keyboard()
            return
        try:
            pressed = os.read(_KEYBOARD, 1 << 10)
        except OSError:
            pressed = b""
        if not pressed:  # the terminal is gone
            self._keys = None
            self._leave_keyboard()
        elif not pressed.startswith(b"\x1b"):
            keys = {*pressed.decode(errors="replace").lower()}
            if keys & {"t", "\n", "\r"}:
                self._ask(time.monotonic(), snapshot=True)
            elif keys & {"h", "?"}:
                self._hold(_HELP.encode())

    def forget_area(self) -> None:
        """Draw the rows again below those that are on the screen, which stay there."""
        super().forget_area()
        self._is_old = True

    def give_back(self) -> None:
        """Restore the modes of the terminal, if this output has changed them. A signal handler may call this."""
        if self._keys is not None:
            set_modes(self._before)


def _for_keys(before: Modes | None) -> Modes | None:
    """Return the modes of a terminal that hands on each key at once, without an echo; Ctrl-C and Ctrl-Z stay signals."""
    if before is None:
        return None
    chars = [*before[6]]
    chars[termios.VMIN], chars[termios.VTIME] = 1, 0
    return [*before[:3], before[3] & ~(termios.ICANON | termios.ECHO), *before[4:6], chars]


def _restore(terminal: int, before: Modes | None, keys: Modes | None) -> None:
    """Give the terminal the modes of `before` if it has those of `keys`: any others are someone else's, as the shell's."""
    if before is not None and termios.tcgetattr(terminal) == keys:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


def _call_at_end_of(front: int, restore: Callable[[], None]) -> None:
    """In the process that makes the rows: call this and end as soon as the front has ended, whatever is done then."""

    def end(*_: object) -> None:
        try:
            restore()
        finally:
            os._exit(0)

    signal.signal(signal.SIGTERM, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal_at_end_of(front, signal.SIGTERM)
