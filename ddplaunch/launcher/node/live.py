"""--live at the front (the process that has the terminal): rows about the job stand below the lines, and keys are ddplaunch's.

A process of its own, the viewer, makes the rows, and gives the terminal its modes back if the front is killed. What the two say
to each other is in `record/window/requests.py`; the front alone writes. Lines that come close together, and the rows below them,
are one write.
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
from itertools import groupby
from operator import itemgetter
from typing import NoReturn

from ddplaunch.launcher.node.front import FrontOutput
from ddplaunch.reach.pipes import BARS, CONTROL, MESSAGE, ROWS, SOCKET, STDERR
from ddplaunch.record.window.requests import Draw, encode
from ddplaunch.system.process.fork import fork
from ddplaunch.system.process.linux import detach, signal_at_end_of
from ddplaunch.system.process.terminal import Modes, modes, set_modes

View = Callable[[socket.socket], None]  # draws the rows, until the socket ends; see record/window/requests.py

_ASKS_EVERY = 1.0  # seconds from one request for rows to the next
_DRAWS_EVERY = 0.05  # seconds from one drawing to the next at least
_MOST_BYTES_HELD = 1 << 16  # bytes that are held so long
_ROWS_TOO_OLD_AFTER = 10.0  # seconds without rows after which the old ones are not shown any more
_KEYBOARD = 0  # stdin
_HELP = "ddplaunch: t or Enter shows where the ranks are, Ctrl-C stops the job, Ctrl-Z pauses it, h shows these keys\n"
_LOST = "ddplaunch: --live has ended, since the process that makes its rows is gone. The job goes on\n"


class LiveOutput(FrontOutput):
    """Writes the agent's messages, held for a moment, and below them rows about the job, which a child (the viewer) makes."""

    def __init__(self, view: View, *, rewraps: bool) -> None:
        """`view` makes the rows, in a process of its own (the viewer); `rewraps`: the terminal wraps anew at another width."""
        super().__init__(rewraps=rewraps)
        self._view = view
        self._modes_before = modes()  # what the terminal gets back; None: we have none, and so no keys
        self._modes_for_keys: Modes | None = None  # in which each key comes at once; None: there are no keys
        self._viewer: socket.socket | None = None  # None before the run has a socket, and once the viewer is lost
        self._socket_place = b""  # of the run's socket, which the viewer asks: FOLDER, a null byte, NAME
        self._held: list[tuple[bytes, bytes]] = []  # what is to be written: stream and data
        self._held_size = 0  # bytes of that
        # times are CLOCK_MONOTONIC seconds
        self._drawn_at = 0.0
        self._is_redraw_due = False  # rows or bars have changed since they were drawn
        self._next_request_at = 0.0  # for rows
        self._asked_at: float | None = None  # when the viewer was asked for rows; None: it has replied
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
                    self._on_message(stream=bytes(buffer[:1]), data=bytes(buffer[1:size]))
                if self._viewer is not None and self._viewer.fileno() in ready:
                    self._read_reply(self._viewer)
                if _KEYBOARD in ready:
                    self._on_keys()
                self._do_what_is_due()
            self._flush(draws=False)
            self._erase_area()
        finally:
            self.restore_terminal()

    def _wait(self) -> set[int]:
        """Wait until there is something to do; return the descriptors that can be read."""
        until = [self._next_request_at] if self._viewer is not None and self._asked_at is None else []
        if self._asked_at is not None:
            until.append(self._asked_at + _ROWS_TOO_OLD_AFTER)
        if self._held or self._is_redraw_due:
            until.append(self._drawn_at + _DRAWS_EVERY)
        timeout = max(0.0, min(until) - time.monotonic()) * 1000 if until else None
        return {fd for fd, _ in self._poll.poll(timeout)}

    def _on_message(self, stream: bytes, data: bytes) -> None:
        """Take a message of the agent or the viewer: the place of the run's socket, progress bars, rows, or output.

        Output, which a snapshot is too, is held for a moment.
        """
        if stream == SOCKET:
            self._on_socket_of_run(data)
        elif stream == BARS:
            self._take_bars(data)
            self._is_redraw_due = True
        elif stream == ROWS:
            self._asked_at = None
            self._show_rows(data.decode(errors="replace").split("\n"))
        elif stream != CONTROL:  # which is for a caller in Python, and that has no --live
            self._held.append((stream, data))
            self._held_size += len(data)

    def _do_what_is_due(self) -> None:
        """Ask for rows if it is time, clear the rows of a viewer that does not reply, and write what is held or drawn."""
        now = time.monotonic()
        if self._viewer is not None:
            has_replied = self._asked_at is None
            if has_replied and now >= self._next_request_at:
                self._take_keyboard()  # or leave it, as long as another job of the shell has the terminal
                self._ask(now)
            elif self._asked_at is not None and now >= self._asked_at + _ROWS_TOO_OLD_AFTER:
                self._show_rows([])
                self._asked_at = now  # so that this is done again only after as long
        draws = bool(self._held or self._is_redraw_due) and now >= self._drawn_at + _DRAWS_EVERY
        if draws or self._held_size >= _MOST_BYTES_HELD:
            self._flush(draws=draws)

    def _flush(self, *, draws: bool) -> None:
        """Write what is held, and if it `draws` the rows below it: one write for what goes to one stream in a row."""
        area, size = self._area, self._terminal_size()
        parts: list[tuple[bytes, bytes]] = []  # stream and data
        for stream, data in self._held:
            # on the terminal, what makes the data stand above the rows
            shown = area.write(data, size) if area is not None and stream in self._terminals else data
            parts.append((stream, shown))
        self._held, self._held_size = [], 0
        if draws and area is not None:
            parts.append((self._stream_of_area, area.draw(size)))
            self._drawn_at, self._is_redraw_due = time.monotonic(), False
        for stream, pieces in groupby(parts, key=itemgetter(0)):
            self._write(stream, memoryview(b"".join(data for _, data in pieces)))

    # --- the process that makes the rows

    def _on_socket_of_run(self, place: bytes) -> None:
        """Show rows about the run whose socket is at this place; after another place, the run is the same."""
        self._socket_place = place
        if self._viewer is None:
            self._start_viewer()

    def _start_viewer(self) -> None:
        """Start the viewer, the process that makes the rows, if there is a terminal; from the next request on keys are ours."""
        if self._area is None:  # there is no terminal
            return
        self._modes_for_keys = _for_keys(self._modes_before)
        front = os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # no handler runs in the child
        try:
            if fork() == 0:
                self._be_viewer(front, theirs)
        except OSError:  # the machine is at a limit, and there are no rows
            ours.close()
            return
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)
        self._viewer = ours
        self._poll.register(ours, select.POLLIN)

    def _be_viewer(self, front: int, requests: socket.socket) -> NoReturn:
        """Be the viewer, a child of `front` (its pid), until `requests` ends; give the terminal its modes back at the end."""
        try:
            signal.set_wakeup_fd(-1)
            detach(requests.fileno(), _KEYBOARD)  # these become descriptors 3 and 4, and all others are closed
            restore = partial(_restore_unless_changed, 4, self._modes_before, self._modes_for_keys)
            _restore_at_end_of(front, restore)
            try:
                self._view(socket.socket(fileno=3))
            finally:
                restore()
        finally:
            os._exit(0)

    def _ask(self, now: float, *, snapshot: bool = False) -> None:
        """Ask the viewer for rows or for a snapshot, of the terminal's size; not while another job of the shell has that."""
        self._next_request_at = now + _ASKS_EVERY
        size = self._terminal_size()
        if self._viewer is None or size is None:
            return
        try:
            self._viewer.send(encode(Draw(self._socket_place, size.columns, size.lines, snapshot)), socket.MSG_DONTWAIT)
        except OSError:  # the viewer reads too little; or it has ended, which `_read_reply` sees
            return
        if not snapshot:
            self._asked_at = now

    def _read_reply(self, viewer: socket.socket) -> None:
        """Take rows, or a part of a snapshot; do without a viewer that has ended."""
        try:
            reply = viewer.recv(1 + MESSAGE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            reply = b""
        if reply:
            self._on_message(stream=reply[:1], data=reply[1:])
            return
        self._do_without_viewer()
        if not self.agent_has_ended:  # else the viewer has ended with the run, as it should
            self._write_above_rows(_LOST)

    def _do_without_viewer(self) -> None:
        """Show no rows any more, and give the keyboard back."""
        if self._viewer is not None:
            self._poll.unregister(self._viewer)
            self._viewer.close()
            self._viewer = self._asked_at = None
            self._show_rows([])
            self._leave_keyboard()
            self.restore_terminal()

    def _show_rows(self, rows: list[str]) -> None:
        if self._area is not None:
            self._area.show_live(rows)
            self._is_redraw_due = True

    def _write_above_rows(self, text: str) -> None:
        self._on_message(STDERR, text.encode())

    # --- keys

    def _take_keyboard(self) -> None:
        """Have keys come as they are pressed, while the shell has put us into its foreground."""
        if self._modes_for_keys is not None and modes() is not None:
            set_modes(self._modes_for_keys)
            self._poll.register(_KEYBOARD, select.POLLIN)
        elif self._modes_for_keys is not None:
            self._leave_keyboard()

    def _leave_keyboard(self) -> None:
        try:
            self._poll.unregister(_KEYBOARD)
        except KeyError:  # it was not ours
            pass

    def _on_keys(self) -> None:
        """Do what the pressed keys ask for: Enter or t a snapshot, h or ? the help. No other key means anything."""
        if modes() is None:  # we are in the shell's background, where a read would stop us
            self._leave_keyboard()
            return
        try:
            pressed = os.read(_KEYBOARD, 1 << 10)
        except OSError:
            pressed = b""
        if not pressed:  # the terminal is gone
            self._modes_for_keys = None
            self._leave_keyboard()
        elif not pressed.startswith(b"\x1b"):  # else an arrow or a function key, whose letters are no keys
            keys = {*pressed.decode(errors="replace").lower()}
            if keys & {"t", "\n", "\r"}:
                self._ask(time.monotonic(), snapshot=True)
            elif keys & {"h", "?"}:
                self._write_above_rows(_HELP)

    def forget_area(self) -> None:
        """Draw the rows again below those that are on the screen, which stay there."""
        super().forget_area()
        self._is_redraw_due = True

    def restore_terminal(self) -> None:
        """Restore the modes of the terminal, if this output has changed them. A signal handler may call this."""
        if self._modes_for_keys is not None:
            set_modes(self._modes_before)


def _for_keys(before: Modes | None) -> Modes | None:
    """Return the modes of a terminal that hands on each key at once, without an echo; Ctrl-C and Ctrl-Z stay signals."""
    if before is None:
        return None
    chars = [*before[6]]
    chars[termios.VMIN], chars[termios.VTIME] = 1, 0
    return [*before[:3], before[3] & ~(termios.ICANON | termios.ECHO), *before[4:6], chars]


def _restore_unless_changed(terminal: int, before: Modes | None, for_keys: Modes | None) -> None:
    """Give the terminal the modes `before`, if it has those `for_keys`: any others are another program's, as the shell's."""
    if before is not None and termios.tcgetattr(terminal) == for_keys:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


def _restore_at_end_of(front: int, restore: Callable[[], None]) -> None:
    """In the viewer: restore the terminal's modes and end as soon as the front (its pid) has ended, whatever is done then."""

    def end(*_: object) -> None:
        try:
            restore()
        finally:
            os._exit(0)

    signal.signal(signal.SIGTERM, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal_at_end_of(front, signal.SIGTERM)
