"""A connection to another agent in the loop: first a `Greeting`, in which both sides prove that they know the key, then a `Peer`.

Never blocks, starts no thread, counts no heartbeats, has no clock. A greeting sends no more than the payloads of the handshake,
which an empty socket always takes, and buffers no more than one short frame.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from ddplaunch.reach.channel import handshake
from ddplaunch.reach.channel.handshake import Decoder, Handshake, Refused, Server, Session, pack
from ddplaunch.spec.outcome import CLOSED
from ddplaunch.system.loop.loop import READ, WRITE, Loop
from ddplaunch.system.loop.stream import FrameError, SendBuffer
from ddplaunch.system.words import why_failed

MAX_QUEUED = 8 << 20  # bytes waiting for a peer above which it is given up
CHUNK = 1 << 16  # bytes read or sent at once, so that a busy peer leaves time for the others
MAX_DISCARDED = 64  # chunks that are discarded when a connection is closed; more are not waited for

DOES_NOT_READ = "does not read"


class Peer:
    """The other side of an authenticated connection.

    Its owner sets `received` and `closed` as soon as it gets the peer. Both are called from the loop only, never from within
    `send` or `close`; `closed` is called once, and not after `close`. What the other side had sent before the connection
    broke is still received, even if sending already fails.
    """

    def __init__(self, loop: Loop, sock: socket.socket, address: str, session: Session, decoder: Decoder) -> None:
        """Take over a socket whose handshake is done; the owner sets `received` and `closed` next."""
        self.address = address  # of the other side, numeric
        self.local_address = host_of(sock.getsockname())
        self.received: Callable[[bytes], None] = lambda payload: None  # until the owner sets it
        self.closed: Callable[[str], None] = lambda reason: None
        self._sock = sock
        self._loop = loop
        self._session = session
        self._decoder = decoder
        self._buffer = SendBuffer(sock)
        self._why_broken = ""  # why nothing can be sent any more; "": it can
        self._is_open = True
        loop.watch(sock, self._on_ready)

    def __repr__(self) -> str:
        return f"<peer {self.address}, {'open' if self._is_open else 'closed'}>"

    def host_silence(self) -> float:
        """Return for how many seconds the kernel of the other side has sent nothing, not even an acknowledgement.

        0.0 where this kernel does not say, as in some sandboxes, and where the connection is no TCP of its own.
        """
        info = self._tcp_info()
        return min(struct.unpack_from("II", info, _LAST_RECEIVED)) / 1000 if info else 0.0

    def sends_in_vain(self) -> bool:
        """Return whether the kernel here sends again what the other side has not acknowledged; False where it does not say."""
        info = self._tcp_info()
        return bool(info and info[_RETRANSMITS])

    def _tcp_info(self) -> bytes | None:
        """Return what the kernel says of the connection; None if nothing, or if this is no TCP of its own."""
        if self._sock.family == socket.AF_UNIX:
            return None
        info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
        return info if len(info) == _TCP_INFO_SIZE else None

    def admit(self) -> None:
        """Take long frames from now on."""
        self._decoder.trust()

    def send(self, payload: bytes) -> None:
        """Send a payload of at most `handshake.LIMIT` bytes; drop the payload if the connection is broken or closed."""
        if self._why_broken or not self._is_open:
            return
        try:
            self._buffer.put(self._session.seal(payload))
        except OSError as error:
            self._give_up_sending(describe(error))
            return
        if self._buffer.size > MAX_QUEUED:
            self._give_up_sending(DOES_NOT_READ)
        self._watch()

    def close(self) -> None:
        """Send as much of the queue as the socket takes at once, and close the connection.

        To be sure that the last frames arrive, wait until the other side closes.
        """
        if not self._is_open:
            return
        self._flush()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            # to close a socket that holds unread data is a reset, which may overtake our last frames
            for _ in range(MAX_DISCARDED):
                if not self._sock.recv(CHUNK):
                    break
        self._discard()

    def receive_rest(self) -> None:
        """Receive what has arrived by now: the other side sends nothing more."""
        with suppress(OSError):  # that is all
            while self._is_open and (data := self._sock.recv(CHUNK)):
                self._decoder.feed(data)
                self.deliver()

    def deliver(self) -> None:
        """Pass to the owner all whole frames that have arrived."""
        while self._is_open:
            try:
                frame = self._decoder.take()
                if frame is None:
                    return
                payload = self._session.open(frame)
            except FrameError as error:
                self._end(str(error))
                return
            self.received(payload)

    def _on_ready(self) -> None:
        """Send what waits, and deliver what has arrived. Called by the loop."""
        if self._why_broken == DOES_NOT_READ:  # after any other reason, what has arrived is delivered first
            self._end(DOES_NOT_READ)
            return
        self._flush()
        try:
            data = self._sock.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(describe(error))
            return
        if data:
            self._decoder.feed(data)
            self.deliver()
            return
        is_within_a_frame = bool(self._decoder.beginning)
        self._end(self._why_broken or (CUT_SHORT if is_within_a_frame else CLOSED))

    def _flush(self) -> None:
        try:
            self._buffer.flush()
        except OSError as error:
            self._give_up_sending(describe(error))
        self._watch()

    def _watch(self) -> None:
        self._loop.watch(self._sock, self._on_ready, READ | WRITE if self._buffer.size else READ)

    def _give_up_sending(self, reason: str) -> None:
        """Send nothing more. The loop sees the shutdown and calls the owner, which must not be re-entered here."""
        self._why_broken = reason
        self._buffer.take()
        with suppress(OSError):  # the other side was faster
            self._sock.shutdown(socket.SHUT_RD)

    def _end(self, reason: str) -> None:
        if reason != CLOSED:
            _reset_at_close(self._sock)
        self._discard()
        self.closed(reason)

    def _discard(self) -> None:
        self._is_open = False
        self._buffer.take()
        self._loop.unwatch(self._sock)
        self._sock.close()


class PeerOwner(Protocol):
    """Who waits for peers: of a greeting, a dialer, a listener. Called from the loop only."""

    def on_opened(self, peer: Peer) -> None:
        """Own a peer that has proven the key; it may close at once, if it has reached us at another address as well."""

    def on_refused(self, who: str, reason: str) -> None:
        """Hear why there is no peer at `who`, an address, with its port if this side has connected to it."""


HANDSHAKE_TIMEOUT = 5.0  # seconds from accept to the end of the handshake


class Greeting:
    """One connected socket during the handshake, from which its owner gets a peer, or the reason why there is none."""

    def __init__(self, loop: Loop, sock: socket.socket, address: Sockaddr, steps: Handshake, owner: PeerOwner) -> None:
        """Begin the handshake on a connected socket; `steps` are those of this side, a `Server` or a `Client`."""
        sock.setblocking(False)
        self.address = host_of(address)
        self.received_any = False  # whether the other side has sent anything
        self._sock = sock
        self._loop = loop
        self._handshake = steps
        self._decoder = Decoder()
        self._owner = owner
        loop.watch(sock, self._on_ready)
        if steps.opening:
            self._send(steps.opening)

    def discard(self) -> None:
        """Close, without calling back."""
        self._loop.unwatch(self._sock)
        self._sock.close()

    def _on_ready(self) -> None:
        """Take a step of the handshake; end the greeting with a session or a reason. Called by the loop."""
        try:
            session = self._receive()
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(describe(error))
        except FrameError:
            self._fail(handshake.NOT_DDPLAUNCH)
        except Refused as refused:
            if refused.reply:
                self._send(refused.reply)
            self._fail(refused.reason)
        else:
            if session:
                self._make_peer(session)

    def _receive(self) -> Session | None:
        """Read and answer what the other side has sent; return the session once both sides have proven the key."""
        data = self._sock.recv(handshake.LIMIT_UNAUTHENTICATED)
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

    def _make_peer(self, session: Session) -> None:
        self._loop.unwatch(self._sock)
        # who connects to us may be one of many, and each frame is kept until it is whole
        self._decoder.trust(handshake.LIMIT_UNKNOWN if isinstance(self._handshake, Server) else handshake.LIMIT)
        peer = Peer(self._loop, self._sock, self.address, session, self._decoder)
        self._owner.on_opened(peer)
        peer.deliver()  # frames that were received together with the end of the handshake

    def _send(self, payload: bytes) -> None:
        with suppress(OSError):  # the connection is broken, which recv() reports, or the other side times out
            self._sock.send(pack(payload))

    def _fail(self, reason: str) -> None:
        self.discard()
        self._owner.on_refused(self.address, reason)


# a process that closes a connection and goes on may have had to drop its last message, since the connection was full
CUT_SHORT = "connection closed in the middle of a message"
RESET = "connection reset"
REJECTED = "rejected by a firewall"

# IP_RECVERR of include/uapi/linux/in.h, IPV6_RECVERR of in6.h
_RECVERR = {socket.AF_INET: (socket.IPPROTO_IP, 11), socket.AF_INET6: (socket.IPPROTO_IPV6, 25)}
TCP_RTO_MAX_MS = 44  # include/uapi/linux/tcp.h
_RTO_MAX = 1000  # milliseconds
# of struct tcp_info there: the milliseconds since data, and since an acknowledgement, have arrived end its first 60 bytes
_LAST_RECEIVED, _TCP_INFO_SIZE = 52, 60
_RETRANSMITS = 2  # how often in vain what was sent first has been sent again, in one byte
_PROBE_AFTER = 2  # seconds without a packet

Sockaddr = tuple[Any, ...]  # as getaddrinfo gives it: address, port, for IPv6 also flow and scope


def prepare(sock: socket.socket, tcp_user_timeout: float) -> None:
    """Never block; send at once; give up when sent data stays unacknowledged for `tcp_user_timeout` seconds.

    Lost segments are sent again each second, where the kernel can do that: else it doubles the pause each time, so that
    a connection which worked again after 7 of 10 seconds would send nothing for 12. A side that has nothing to send asks the
    kernel of the other whether it is there, for `Peer.host_silence`.
    """
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(tcp_user_timeout * 1000)))
    with suppress(OSError):  # Linux before 6.15
        sock.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, _RTO_MAX)
    for option, value in ((socket.TCP_KEEPIDLE, _PROBE_AFTER), (socket.TCP_KEEPINTVL, 1)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def sends_again_each_second() -> bool:
    """Return whether this kernel can be told to send again each second what was lost; see `prepare`."""
    with socket.socket() as probe, suppress(OSError):
        probe.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, _RTO_MAX)
        return True
    return False


def host_of(address: Sockaddr) -> str:
    """The address alone; an IPv4 one that came through an IPv6 socket as what it is; "" of what something else carries."""
    return str(address[0]).removeprefix("::ffff:") if address else ""


def endpoint_of(address: Sockaddr) -> str:
    """Address and port as they are usually written."""
    host = host_of(address)
    return f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"


def describe(error: OSError) -> str:
    """Return the error of a connection as text."""
    if isinstance(error, (ConnectionResetError, BrokenPipeError)):
        return RESET
    return why_failed(error)


def _reset_at_close(sock: socket.socket) -> None:
    """Have the other side read "connection reset", not a close, which it would take for the end of this process."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def keep_rejections(sock: socket.socket, keep: bool) -> None:
    """Have the kernel keep the ICMP messages about this socket, for `error_of`, or not: a connection is to survive them."""
    with suppress(OSError):  # some sandboxes have none
        sock.setsockopt(*_RECVERR[sock.family], int(keep))


def _was_rejected_by_firewall(sock: socket.socket) -> bool:
    """Whether an ICMP message has ended this connect(): a firewall on the way sends one, where the host itself sends RST."""
    with suppress(OSError):
        sock.recvmsg(1, 0, socket.MSG_ERRQUEUE)
        return True
    return False


def error_of(sock: socket.socket) -> OSError | None:
    """Return the error of a connect() that could not finish at once; None if the socket is connected."""
    number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    try:
        if not number and sock.getsockname() == sock.getpeername():
            # where no socket listens, the kernel may assign the ephemeral port to the very socket that connects to it
            number = errno.ECONNREFUSED
            # release the port at once, or the process that is to listen there could not bind it
            _reset_at_close(sock)
    except OSError as error:  # it is connected no more
        return error
    if number == errno.ECONNREFUSED and _was_rejected_by_firewall(sock):
        return OSError(number, REJECTED)
    return OSError(number, os.strerror(number)) if number else None
