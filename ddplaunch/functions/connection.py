"""The connections of workers to the caller of `launch()`: one call goes to each, one answer comes back. Unpickles nothing.

They come over an abstract Unix address, which leaves no file behind whatever ends the caller. A stranger is refused: by the
kernel's word on whose process it is, and by a secret that workers have from their environment.
"""

from __future__ import annotations

import os
import pickle
import selectors
import socket
import struct
from collections.abc import Callable
from typing import Any

from ddplaunch.functions import pickling
from ddplaunch.record import record

# the same in worker/call.py, which runs where ddplaunch need not be
HELLO = struct.Struct("!32sii")  # secret, rank, world size
CALL = struct.Struct("!QQI")  # sizes of the preparation and of the function, number of descriptors
ANSWER = struct.Struct("!cQ")  # kind, size
RESULT, ERROR = b"r", b"e"
AT_ONCE = 200  # descriptors in one message; Linux takes 253

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: unix(7), SO_PEERCRED
_AT_A_TIME = 1 << 20  # bytes
_ERROR_LIMIT = 8 << 20  # bytes of an answer that is an exception


@record(kw_only=True)
class Hello:
    """What a worker says of itself."""

    rank: int
    world_size: int


class Listener:
    """Where workers come to."""

    def __init__(self) -> None:
        self._name = f"ddplaunch/{os.urandom(16).hex()}"
        self._secret = os.urandom(32)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind(f"\0{self._name}")
        self.socket.listen(512)
        self.socket.setblocking(False)

    @property
    def address(self) -> str:
        """What workers find in their environment."""
        return f"{self._name} {self._secret.hex()}"

    def accept(self) -> socket.socket | None:
        """Take the next connection; None if it is a stranger's, or gone again."""
        try:
            connection, _ = self.socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] != os.geteuid():
            connection.close()
            return None
        connection.setblocking(False)
        return connection

    def is_ours(self, secret: bytes) -> bool:
        """Whether this is the secret that only our workers know."""
        from hmac import compare_digest

        return compare_digest(secret, self._secret)

    def close(self) -> None:
        """Let nobody in any more."""
        self.socket.close()


class Line:
    """One connection. Never blocks."""

    def __init__(
        self,
        connection: socket.socket,
        selector: selectors.BaseSelector,
        *,
        greeted: Callable[[Line, bytes, Hello], tuple[pickling.Sent, dict[str, Any]] | None],
        result_limit: int,
    ) -> None:
        """Take a connection; `greeted` gives the call for whoever said hello with that secret, None: nobody of ours."""
        self._connection = connection
        self._selector = selector
        self._greeted = greeted
        self._result_limit = result_limit
        self._buffer = bytearray(HELLO.size)
        self._filled = 0
        self._kind = b""
        self._taker: Callable[[], bool] = self._take_hello
        self._waiting: list[tuple[memoryview, tuple[int, ...]]] = []
        self._descriptors: tuple[int, ...] = ()
        self.answer: tuple[bytes, bytearray] | None = None
        self.open = True
        selector.register(connection, selectors.EVENT_READ, self._ready)

    def close(self) -> None:
        """Let go of it."""
        if self.open:
            self.open = False
            self._selector.unregister(self._connection)
            self._connection.close()
            self._let_go()

    def drain(self) -> None:
        """Take in what a worker that has ended left."""
        while self.open and self._read():
            pass

    def _ready(self) -> None:
        if self._waiting:
            self._write()
        if self.open:
            self._read()

    # --- what comes

    def _read(self) -> bool:
        """Read some; say whether there may be more."""
        try:
            view = memoryview(self._buffer)[self._filled :][:_AT_A_TIME]
            number = self._connection.recv_into(view)
        except BlockingIOError:
            return False
        except OSError:
            number = 0
        if not number:
            self.close()
            return False
        self._filled += number
        if self._filled == len(self._buffer) and not self._taker():
            self.close()
        return True

    def _expect(self, size: int, taker: Callable[[], bool]) -> bool:
        self._buffer, self._filled, self._taker = bytearray(size), 0, taker
        return True

    def _take_hello(self) -> bool:
        secret, rank, world_size = HELLO.unpack(self._buffer)
        hello = Hello(rank=rank, world_size=world_size)
        call = self._greeted(self, secret, hello)
        if call is None:
            return False
        self._send(*call)
        return self._expect(ANSWER.size, self._take_head)

    def _take_head(self) -> bool:
        self._kind, size = ANSWER.unpack(self._buffer)
        limit = {RESULT: self._result_limit, ERROR: _ERROR_LIMIT}.get(self._kind, -1)
        return 0 < size <= limit and self._expect(size, self._take_answer)

    def _take_answer(self) -> bool:
        self.answer = (self._kind, self._buffer)
        return False

    # --- what goes

    def _send(self, sent: pickling.Sent, more: dict[str, Any]) -> None:
        self._descriptors = sent.descriptors
        prepared = pickle.dumps({"preparation": sent.preparation, **more})
        head = CALL.pack(len(prepared), len(sent.pickle), len(sent.descriptors))
        groups = [sent.descriptors[at : at + AT_ONCE] for at in range(0, len(sent.descriptors), AT_ONCE)]
        self._waiting = [
            (memoryview(head), ()),
            *((memoryview(b"."), group) for group in groups),
            (memoryview(prepared), ()),
            (memoryview(sent.pickle), ()),
        ]
        self._selector.modify(self._connection, selectors.EVENT_READ | selectors.EVENT_WRITE, self._ready)
        self._write()

    def _write(self) -> None:
        while self._waiting:
            data, descriptors = self._waiting[0]
            beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))]
            try:
                number = self._connection.sendmsg([data[:_AT_A_TIME]], beside if descriptors else [])
            except BlockingIOError:
                return
            except OSError:  # it is gone; what it said before is still to be read
                self._waiting.clear()
                break
            if number < len(data):
                self._waiting[0] = (data[number:], ())
            else:
                del self._waiting[0]
        self._let_go()
        self._selector.modify(self._connection, selectors.EVENT_READ, self._ready)

    def _let_go(self) -> None:
        pickling.close(self._descriptors)
        self._descriptors = ()
