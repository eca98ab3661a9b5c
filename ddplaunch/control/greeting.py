"""A connection on which the sides still have to prove that they know the key; it ends as a peer or as a reason.

Sends no more than the handshake's payloads, which an empty socket always takes, and buffers no more than one short frame.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable

from ddplaunch.control.frames import LIMIT_UNKNOWN, Decoder, FrameError, pack
from ddplaunch.control.handshake import STRANGER, Handshake, Refused, Session
from ddplaunch.control.peer import Peer
from ddplaunch.control.tcp import CLOSED, Sockaddr, host_of, words

PATIENCE = 5.0  # seconds from accept to the end of the handshake


class Greeting:
    """One connected socket during the handshake. At most one of `opened` and `failed` is called, from the loop."""

    def __init__(
        self,
        sock: socket.socket,
        address: Sockaddr,
        selector: selectors.BaseSelector,
        handshake: Handshake,
        *,
        opened: Callable[[Peer], None],
        failed: Callable[[str], None],
    ) -> None:
        self.address = host_of(address)
        self.heard = False  # whether the other side has said anything
        self._sock = sock
        self._selector = selector
        self._handshake = handshake
        self._decoder = Decoder()
        self._opened = opened
        self._failed = failed
        selector.register(sock, selectors.EVENT_READ, self._ready)
        if handshake.opening:
            self._say(handshake.opening)

    def discard(self) -> None:
        """Close without a word to anybody."""
        self._selector.unregister(self._sock)
        self._sock.close()

    def _ready(self) -> None:
        try:
            session = self._listen()
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(words(error))
        except FrameError:
            self._fail(STRANGER)
        except Refused as refused:
            if refused.reply:
                self._say(refused.reply)
            self._fail(refused.reason)
        else:
            if session:
                self._open(session)

    def _listen(self) -> Session | None:
        data = self._sock.recv(LIMIT_UNKNOWN)
        if not data:
            raise Refused(CLOSED)
        self.heard = True
        self._decoder.feed(data)
        while (payload := self._decoder.take()) is not None:
            step = self._handshake.receive(payload)
            if step.reply:
                self._say(step.reply)
            if step.session:
                return step.session
        return None

    def _open(self, session: Session) -> None:
        self._selector.unregister(self._sock)
        self._decoder.trust()
        peer = Peer(self._sock, self.address, self._selector, session, self._decoder)
        self._opened(peer)
        peer.deliver()  # what came in one piece with the last word of the handshake

    def _say(self, payload: bytes) -> None:
        try:
            self._sock.send(pack(payload))
        except OSError:
            pass  # the connection is broken, of which recv() tells, or the other side has to wait in vain

    def _fail(self, reason: str) -> None:
        self.discard()
        self._failed(reason)
