"""The connections of workers to the caller of `launch()`: one call goes to each, one reply comes back. Unpickles nothing.

They use an abstract Unix socket, which leaves no file behind whatever ends the caller. Other processes are refused: by the
user id that the kernel gives (SO_PEERCRED), and by a secret that workers have in their environment. Both sides prove that they
know it before either unpickles anything, and neither says it:

    caller: nonce
    worker: nonce, rank, world size, proof
    caller: proof, call
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from ddplaunch.record.run_socket import uid_of
from ddplaunch.system.loop.loop import READ, WRITE, Loop
from ddplaunch.system.process.linux import memory_file
from ddplaunch.tools.functions import pickling

# the same in worker/call.py, which runs where ddplaunch need not be
NONCE_SIZE = 32  # bytes; a proof has as many
HELLO = struct.Struct("!32sii32s")  # nonce, rank, world size, proof
CALL = struct.Struct("!QQI")  # sizes of the preparation and of the function, number of descriptors
ANSWER = struct.Struct("!cQ")  # kind, size
RESULT, ERROR = b"r", b"e"
DESCRIPTORS_AT_ONCE = 200  # in one message; Linux takes 253

_CHUNK = 1 << 20  # bytes
_LONGEST_STACKS = 1 << 16  # bytes of a file that are read
_ERROR_LIMIT = 8 << 20  # bytes of a reply that is an exception


class WorkerListener:
    """The caller's socket to which the workers of its job connect, and the secret that they share."""

    def __init__(self) -> None:
        self._name = f"ddplaunch/{os.urandom(16).hex()}"
        self._secret = os.urandom(32)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind(f"\0{self._name}")
        self.socket.listen(512)
        self.socket.setblocking(False)

    @property
    def address(self) -> str:
        """The address and the secret, for the environment of workers."""
        return f"{self._name} {self._secret.hex()}"

    def accept(self) -> socket.socket | None:
        """Accept a connection; None if it belongs to another user, or is closed already."""
        try:
            connection, _ = self.socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        if uid_of(connection) != os.geteuid():
            connection.close()
            return None
        connection.setblocking(False)
        return connection

    def prove(self, role: bytes, said: bytes) -> bytes:
        """Return the proof that a side ("caller", "worker") knows the secret, over what both have said before."""
        from hmac import digest  # only functions need it

        return digest(self._secret, role + said, "sha256")

    def close(self) -> None:
        """Accept no more connections."""
        self.socket.close()


class Reply(NamedTuple):
    """What a worker has sent, pickled: the result of its function, or the exception."""

    kind: bytes  # RESULT or ERROR
    data: bytearray


class WorkerCall(NamedTuple):
    """What a worker gets: the function, and what worker/call.py has to keep to."""

    payload: pickling.Payload
    limits: dict[str, Any]  # "result_limit": bytes; "stacks_after": seconds until the worker writes its stacks, or None


class Calls(Protocol):
    """Who has the calls for workers."""

    def call_for(self, worker: WorkerConnection, rank: int, world_size: int) -> WorkerCall | None:
        """Return the call for a worker that has said hello as this rank; None: there is none, and the connection is closed."""


class WorkerConnection:
    """The caller's connection from one worker: hello, call, reply. Never blocks; the reply is kept, and not unpickled here."""

    def __init__(
        self, loop: Loop, connection: socket.socket, listener: WorkerListener, calls: Calls, result_limit: int
    ) -> None:
        """Take a connection from the listener; after the hello, `calls` has the call for the worker."""
        self._connection = connection
        self._loop = loop
        self._listener = listener
        self._calls = calls
        self._nonce = os.urandom(NONCE_SIZE)
        self._result_limit = result_limit  # bytes
        self._buffer = bytearray(HELLO.size)  # for the part that the worker sends next
        self._filled = 0  # bytes of it that have come
        # called when the buffer is full; returns whether another part follows
        self._on_part: Callable[[], bool] = self._on_hello
        self._kind = b""  # of the reply
        # for the worker: pieces of data, each with the descriptors that travel beside it
        self._queue: list[tuple[memoryview, tuple[int, ...]]] = []
        self._descriptors: tuple[int, ...] = ()  # to be closed once they are sent
        self.reply: Reply | None = None  # until it has come whole
        self.open = True
        loop.watch(connection, self._on_ready)
        with suppress(OSError):  # it has closed already
            connection.send(self._nonce)  # an empty socket takes it whole

    def close(self) -> None:
        """Close the connection."""
        if self.open:
            self.open = False
            self._loop.unwatch(self._connection)
            self._connection.close()
            self._close_descriptors()

    def drain(self) -> None:
        """Read the rest of what the worker sent before its end."""
        while self.open and self._read():
            pass

    def _on_ready(self) -> None:
        """Send what waits for the worker, and read once. Called by the loop."""
        if self._queue:
            self._write()
        if self.open:
            self._read()

    # --- from the worker

    def _read(self) -> bool:
        """Read once; return whether there may be more."""
        try:
            view = memoryview(self._buffer)[self._filled :][:_CHUNK]
            number = self._connection.recv_into(view)
        except BlockingIOError:
            return False
        except OSError:
            number = 0
        if not number:
            self.close()
            return False
        self._filled += number
        is_part_whole = self._filled == len(self._buffer)
        if is_part_whole:
            another_follows = self._on_part()
            if not another_follows:
                self.close()
        return True

    def _expect(self, size: int, on_part: Callable[[], bool]) -> None:
        """Call `on_part` once the worker has sent so many bytes more."""
        self._buffer, self._filled, self._on_part = bytearray(size), 0, on_part

    def _on_hello(self) -> bool:
        """Check that the worker knows the secret, and send it its call; return whether the connection goes on."""
        from hmac import compare_digest

        _nonce, rank, world_size, proof = HELLO.unpack(self._buffer)
        hello_without_proof = bytes(self._buffer[: -len(proof)])  # with the worker's nonce
        said = self._nonce + hello_without_proof  # what is proved, so that no old proof fits: both nonces are random
        knows_secret = compare_digest(proof, self._listener.prove(b"worker", said))
        if not knows_secret or not 0 <= rank < world_size:
            return False
        call = self._calls.call_for(self, rank, world_size)
        if call is None:
            return False
        self._send(self._listener.prove(b"caller", said), call)
        self._expect(ANSWER.size, self._on_head)
        return True

    def _on_head(self) -> bool:
        """Read the head of the reply: its kind and its size; return whether the connection goes on."""
        self._kind, size = ANSWER.unpack(self._buffer)
        limit = {RESULT: self._result_limit, ERROR: _ERROR_LIMIT}.get(self._kind, -1)
        if not 0 < size <= limit:
            return False
        self._expect(size, self._on_reply)
        return True

    def _on_reply(self) -> bool:
        """Keep the reply, which is the last that a worker sends."""
        self.reply = Reply(self._kind, self._buffer)
        return False

    # --- to the worker

    def _send(self, proof: bytes, call: WorkerCall) -> None:
        """Queue the `proof` that we know the secret, and the worker's call with the descriptors that it holds."""
        payload = call.payload
        self._descriptors = payload.descriptors
        prepared = pickle.dumps({"preparation": payload.preparation, **call.limits})
        head = CALL.pack(len(prepared), len(payload.pickle), len(payload.descriptors))
        starts = range(0, len(payload.descriptors), DESCRIPTORS_AT_ONCE)
        groups = [payload.descriptors[at : at + DESCRIPTORS_AT_ONCE] for at in starts]
        carriers = ((memoryview(b"."), group) for group in groups)  # descriptors travel beside at least one byte
        self._queue = [
            (memoryview(proof + head), ()),
            *carriers,
            (memoryview(prepared), ()),
            (memoryview(payload.pickle), ()),
        ]
        self._loop.watch(self._connection, self._on_ready, READ | WRITE)
        self._write()

    def _write(self) -> None:
        """Send as much of the queue as the socket takes; stop watching for room at its end."""
        while self._queue:
            data, descriptors = self._queue[0]
            beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))]
            try:
                number = self._connection.sendmsg([data[:_CHUNK]], beside if descriptors else [])
            except BlockingIOError:
                return
            except OSError:  # it has closed; what it sent before is still to be read
                self._queue.clear()
                break
            if number < len(data):
                self._queue[0] = (data[number:], ())  # the descriptors have gone with the first byte
            else:
                del self._queue[0]
        self._close_descriptors()
        self._loop.watch(self._connection, self._on_ready)

    def _close_descriptors(self) -> None:
        pickling.close(self._descriptors)
        self._descriptors = ()


class StackFiles:
    """Files in memory, one for each rank of the latest generation, which writes its stacks there shortly before the timeout."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}  # descriptors, by rank

    def renew(self, rank: int) -> int:
        """Make a new file for a rank, in place of the last generation's; return a second descriptor of it, to be sent."""
        if (old := self._files.pop(rank, None)) is not None:
            os.close(old)
        self._files[rank] = memory_file(f"ddplaunch-stacks-{rank}")
        return os.dup(self._files[rank])

    def read(self) -> list[tuple[int, str]]:
        """Return the ranks that have written stacks, in order, each with its text."""
        texts = ((rank, os.pread(file, _LONGEST_STACKS, 0)) for rank, file in sorted(self._files.items()))
        return [(rank, text.decode(errors="replace")) for rank, text in texts if text]

    def close(self) -> None:
        """Remove the files."""
        for file in self._files.values():
            os.close(file)
