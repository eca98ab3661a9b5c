"""A connection during the handshake, in which both sides prove that they know the key; it becomes a peer, or fails.

Sends no more than the handshake's payloads, which an empty socket always takes, and buffers no more than one short frame.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from ddplaunch.control.frames import LIMIT, LIMIT_UNAUTHENTICATED, LIMIT_UNKNOWN, Decoder, pack
from ddplaunch.control.handshake import NOT_DDPLAUNCH, Handshake, Refused, Server, Session
from ddplaunch.control.peer import Peer
from ddplaunch.control.tcp import CLOSED, Sockaddr, describe, host_of
from ddplaunch.loop.frames import FrameError
from ddplaunch.loop.loop import Loop

HANDSHAKE_TIMEOUT = 5.0  # seconds from accept to the end of the handshake


class Greeting:
    """One connected socket during the handshake. At most one of `opened` and `failed` is called, from the loop."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        address: Sockaddr,
        handshake: Handshake,
        *,
        opened: Callable[[Peer], None],
        failed: Callable[[str], None],
    ) -> None:
        self.address = host_of(address)
        self.received_any = False  # whether the other side has sent anything
        self._sock = sock
        self._loop = loop
        self._handshake = handshake
        self._decoder = Decoder()
        self._opened = opened
        self._failed = failed
        loop.watch(sock, self._ready)
        if handshake.opening:
            self._send(handshake.opening)

    def discard(self) -> None:
        """Close, without calling back."""
        self._loop.unwatch(self._sock)
        self._sock.close()

    def _ready(self) -> None:
        try:
            session = self._receive()
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(describe(error))
        except FrameError:
            self._fail(NOT_DDPLAUNCH)
        except Refused as refused:
            if refused.reply:
                self._send(refused.reply)
            self._fail(refused.reason)
        else:
            if session:
                self._open(session)

    def _receive(self) -> Session | None:
        data = self._sock.recv(LIMIT_UNAUTHENTICATED)
        if not data:
            raise Refused(CLOSED)
        self.received_any = True
        self._decoder.feed(data)
        while (payload := self._decoder.take()) is not None:
            step = self._handshake.receive(payload)
            if step.reply:
                self._send(step.reply)
            if step.session:
                return step.session
        return None

    def _open(self, session: Session) -> None:
        self._loop.unwatch(self._sock)
        # who connects to us may be one of many, and each frame is kept until it is whole
        self._decoder.trust(LIMIT_UNKNOWN if isinstance(self._handshake, Server) else LIMIT)
        peer = Peer(self._loop, self._sock, self.address, session, self._decoder)
        self._opened(peer)
        peer.deliver()  # frames that were received together with the end of the handshake

    def _send(self, payload: bytes) -> None:
        try:
            self._sock.send(pack(payload))
        except OSError:
            pass  # the connection is broken, which recv() reports, or the other side times out

    def _fail(self, reason: str) -> None:
        self.discard()
        self._failed(reason)
