"""One end of the control channel that can say anything, and what agents say."""

import json
import socket
import time
from collections.abc import Sequence
from typing import Any

from ddplaunch.cli.job import parse, resolve
from ddplaunch.launcher.job import join
from ddplaunch.plan.cluster.checks import ClusterFacts
from ddplaunch.plan.cluster.discover import discover
from ddplaunch.plan.devices.node import inspect
from ddplaunch.plan.make import make_plan
from ddplaunch.reach.channel.handshake import Client, Decoder, Handshake, Key, Session, pack
from tests.conftest import PATIENCE
from tests.unit.builders import Host


class Speaker:
    """One end of a connection that can say anything; if it takes part in the handshake, it does so rightly."""

    def __init__(self, sock: socket.socket, handshake: Handshake | None = None) -> None:
        self.sock = sock
        self._decoder = Decoder()
        self._session = self._introduce(handshake) if handshake is not None else None

    def _introduce(self, handshake: Handshake) -> Session:
        if handshake.opening:
            self.sock.sendall(pack(handshake.opening))
        while True:
            while (payload := self._decoder.take()) is not None:
                step = handshake.receive(payload)
                if step.reply is not None:
                    self.sock.sendall(pack(step.reply))
                if step.session is not None:
                    self._decoder.trust()
                    return step.session
            self._decoder.feed(self.sock.recv(1 << 16))

    def sealed(self, message: dict[str, Any] | bytes) -> bytes:
        """Sign a message."""
        assert self._session is not None
        return self._session.seal(message if isinstance(message, bytes) else json.dumps(message).encode())

    def say(self, message: dict[str, Any] | bytes) -> None:
        """Send a message, signed."""
        self.shout(self.sealed(message))

    def hear(self, kind: str) -> dict[str, Any]:
        """Wait for a message of this kind, and answer meanwhile as agents do."""
        assert self._session is not None
        while True:
            while (frame := self._decoder.take()) is not None:
                message: dict[str, Any] = json.loads(self._session.open(frame))
                if message["type"] == kind:
                    return message
                if message["type"] == "ping":
                    self.say({"type": "pong", "sent": message["sent"], "at": time.monotonic()})
            data = self.sock.recv(1 << 16)
            assert data, f"closed, and waited for {kind}"
            self._decoder.feed(data)

    def is_shown_out(self) -> None:
        """Wait until the coordinator closes the connection."""
        try:
            while self.sock.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass

    def shout(self, data: bytes) -> None:
        """Send as much of this as is taken."""
        try:
            self.sock.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass


class Visitor(Speaker):
    """A connection to the coordinator; with the key it has introduced itself."""

    def __init__(self, port: int, key: Key | None = None) -> None:
        sock = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        super().__init__(sock, Client(key) if key is not None else None)


def key_of(nodes, *flags: object, meeting: Sequence[object] = ()) -> Key:
    """The key of the job, as an agent of its finds it; `meeting` are the flags that say where, if node ranks are not typed."""
    spec = resolve(parse([str(word) for word in (*(meeting or nodes.static(2, 1)), *flags)]), {}, None)
    node = inspect(spec, {})
    allocation = discover(ClusterFacts(spec=spec, env={}, hostname=node.host, here=Host()))
    draft = make_plan(spec, allocation, node, run_id="")
    return join.prepare(spec, allocation, draft, {}, torch="").key


def hello(requested_rank: int | None = None, host: str = "visitor", workers: int = 1, **facts: str) -> dict[str, Any]:
    names = ("ddplaunch", "python", "torch", "script", "nnodes")
    return {
        "type": "hello",
        "requested_rank": requested_rank,
        "host": host,
        "workers": workers,
        "backend": "gloo",
        "backend_reason": "",
        "reached": "127.0.0.1",
        "facts": {name: facts.get(name, "") for name in names},
    }


def ended(generation: int = 0, exits: object = ()) -> dict[str, Any]:
    return {
        "type": "ended",
        "generation": generation,
        "exits": exits,
        "start_failure": None,
        "leftovers": (),
        "traces": {"oom_kills": 0, "shm": None, "log_folder": None},
    }


def stacks_at_end(stacks: object) -> dict[str, Any]:
    return {"type": "stacks_at_end", "generation": 0, "stacks": stacks}


END = [1, 0, "", 4711, "cpu", 7, None, 5.0, 1.0, None, None, False, 0, 0.0, None, "", None]
STOPPING = {"type": "stopping", "why": "signalled", "signum": 15}
