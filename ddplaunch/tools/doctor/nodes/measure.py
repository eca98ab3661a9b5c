"""Measures the way from this node to another one over TCP, and serves nodes that measure the way to this one. Needs no torch.

Each connection begins with 16 random bytes and their HMAC by the job's token, and the server replies with an HMAC that names its
node: what else answers at an address, as another host under a wrong name does, is told from the node, and strangers get nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import pairwise
from typing import NamedTuple

from ddplaunch.system.fields import host, line
from ddplaunch.system.net.port import for_all_addresses
from ddplaunch.system.words import why_failed
from ddplaunch.tools.doctor.nodes.messages import MAX_ADDRESSES, Blocked, Measure, Met, Way

CONNECT_TIMEOUT = 2.5  # seconds: the kernel sends a lost SYN again after 1 s
ECHO_TIMEOUT = 2.0  # seconds
PINGS = 21  # an odd number has a median
_PARTS = 6  # in which the time of sending is divided; the best of them is the speed
_FEW_PACKETS = 1000  # 1.5 MB; of fewer even a lossy link may lose none, which says nothing
_MOST_CLIENTS = 512  # one node measures one other at a time, at all addresses and ports of that at once
_SILENCE_LIMIT = 5.0  # seconds after which a client is dropped
_BLOCK = 1 << 18  # bytes
_SEED_SIZE, _PROOF_SIZE = 16, 32  # bytes
_AS_CLIENT = -1  # in the proof of a client, in place of a node rank
_IP_MTU, _IPV6_MTU = 14, 24  # linux/in.h, linux/in6.h
_TCP_INFO_SIZE, _TOTAL_RETRANS, _BYTES_ACKED, _DATA_SEGS_OUT = 160, 100, 120, 156  # offsets in linux/tcp.h

# --- the side that is measured


def listen(port: int = 0) -> socket.socket:
    """Listen on a port of all addresses (0: any free port).

    Raises:
        OSError: the port is taken.
    """
    stream = for_all_addresses()
    try:
        stream.bind(("", port))
        stream.listen(128)
    except OSError:
        stream.close()
        raise
    return stream


def serve(listeners: Sequence[socket.socket], token: str, node_rank: int) -> None:
    """Serve all that connect to this node, each in a thread; never returns. Beyond `_MOST_CLIENTS`, a connection is closed."""
    import threading  # of all processes only this one has threads

    free = threading.BoundedSemaphore(_MOST_CLIENTS)

    def serve_one(client: socket.socket) -> None:
        try:
            _serve_client(client, token, node_rank)
        finally:
            free.release()

    with selectors.DefaultSelector() as selector:
        for listener in listeners:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ, listener)
        while True:
            for key, _ in selector.select():
                with suppress(OSError):  # the client is gone
                    client = key.data.accept()[0]
                    if free.acquire(blocking=False):
                        threading.Thread(target=serve_one, args=(client,), daemon=True).start()
                    else:
                        client.close()


def _serve_client(client: socket.socket, token: str, node_rank: int) -> None:
    """Prove to a client that this is the node, echo its pings, and read the data that it sends; a stranger gets nothing."""
    with closing(client), suppress(OSError):
        client.settimeout(_SILENCE_LIMIT)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = _receive(client, _SEED_SIZE + _PROOF_SIZE)
        seed, proof = hello[:_SEED_SIZE], hello[_SEED_SIZE:]
        if not hmac.compare_digest(proof, _proof(token, seed, _AS_CLIENT)):
            return
        client.sendall(_proof(token, seed, node_rank))
        for _ in range(PINGS):
            client.sendall(_receive(client, 1))
        sink = bytearray(_BLOCK)
        while client.recv_into(sink):
            pass


def _receive(sock: socket.socket, length: int) -> bytes:
    """Return so many bytes.

    Raises:
        OSError: there are no more.
    """
    received = b""
    while len(received) < length:
        if not (data := sock.recv(length - len(received))):
            raise ConnectionResetError("the other side has closed")
        received += data
    return received


def _proof(token: str, seed: bytes, node_rank: int) -> bytes:
    """Return what proves that the sender knows the token, a server with its node rank, a client with `_AS_CLIENT`."""
    return hmac.digest(token.encode(), b"ddplaunch doctor %d %s" % (node_rank, seed), hashlib.sha256)


# --- the side that measures


Address = tuple[str, int]  # numeric, and a port


def measure(request: Measure, token: str) -> Way:
    """Measure the way to a node: which of its addresses and ports answer, how soon, how fast."""
    targets = [(address, port) for address in request.addresses for port in request.ports]
    answered, errors = connect(targets, token, request.node_rank)  # what answers has to prove that it is this node
    try:
        reached = [address for address in request.addresses if any(address == one for one, _ in answered)]
        if not reached:
            # of several addresses the first error
            why_by_port = {port: why for (_, port), why in reversed(errors.items())}
            return Way(blocked=tuple(Blocked(port, why) for port, why in why_by_port.items()))
        address = reached[0]  # they are the likeliest first
        blocked = tuple(
            Blocked(port, errors[address, port]) for port in request.ports if (address, port) not in answered
        )
        sock = next(answered[address, port] for port in request.ports if (address, port) in answered)
        sock.settimeout(ECHO_TIMEOUT)
        latency = _latency(sock)
        speed, resent = _speed(sock, request.seconds)
        mtu = _mtu(sock)
        return Way(address=host(address), blocked=blocked, latency=latency, speed=speed, resent=resent, mtu=mtu)
    finally:
        for sock in answered.values():
            sock.close()


def meet(name: str, port: int, token: str) -> Met:
    """Resolve a name and connect to each of its addresses, to find out where node 0 answers. Called on the other nodes."""
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return Met(error=line(why_failed(error)))
    except ValueError as error:  # not a host name at all
        return Met(error=line(str(error)))
    each_once = dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found)
    addresses = list(each_once)[:MAX_ADDRESSES]
    answered, errors = connect([(address, port) for address in addresses], token, node_rank=0)
    for sock in answered.values():
        sock.close()
    reached = next((address for address in addresses if (address, port) in answered), None)
    return Met(  # `host` and `line` make a text fit for a message
        addresses=tuple(map(host, addresses)),
        reached=None if reached is None else host(reached),
        error=", ".join(dict.fromkeys(errors.values())),
    )


class _Attempt:
    """A connection to one address: the kernel makes it, `greet` says hello, and the server proves which node it is."""

    def __init__(self, target: Address, sock: socket.socket) -> None:
        """Take a socket that is connecting."""
        self.target = target
        self.sock = sock
        self.is_greeted = False
        self._received = b""

    def greet(self, hello: bytes) -> None:
        """Say hello once the socket is writable; raise OSError if it is so because the kernel could not connect."""
        if number := self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(number, os.strerror(number))
        self.sock.send(hello)  # an empty socket takes it
        self.is_greeted = True

    def has_proved(self, expected: bytes) -> bool:
        """Read what has come; return whether the proof is whole. Raise OSError if the connection leads to something else."""
        data = self.sock.recv(_PROOF_SIZE - len(self._received))
        self._received += data
        if self._received == expected:
            return True
        if not data or len(self._received) == _PROOF_SIZE:
            raise ConnectionError("something else answers there")
        return False


def connect(
    targets: Sequence[Address], token: str, node_rank: int
) -> tuple[dict[Address, socket.socket], dict[Address, str]]:
    """Connect to all addresses at once; return the sockets whose server has proved to be the node, and why the others failed."""
    answered: dict[Address, socket.socket] = {}
    errors: dict[Address, str] = {}
    seed = os.urandom(_SEED_SIZE)
    hello, expected = seed + _proof(token, seed, _AS_CLIENT), _proof(token, seed, node_rank)
    until = time.monotonic() + CONNECT_TIMEOUT

    def drop(attempt: _Attempt, why: str) -> None:
        errors[attempt.target] = line(why)
        selector.unregister(attempt.sock)
        attempt.sock.close()

    with selectors.DefaultSelector() as selector:
        for target in targets:
            try:
                attempt = _Attempt(target, _connecting(*target))
            except OSError as error:
                errors[target] = line(why_failed(error))
            else:
                selector.register(attempt.sock, selectors.EVENT_WRITE, attempt)
        while selector.get_map() and (remaining := until - time.monotonic()) > 0:
            for key, _ in selector.select(remaining):
                attempt = key.data
                try:
                    if not attempt.is_greeted:
                        attempt.greet(hello)
                        selector.modify(attempt.sock, selectors.EVENT_READ, attempt)
                    elif attempt.has_proved(expected):
                        selector.unregister(attempt.sock)
                        answered[attempt.target] = attempt.sock
                except OSError as error:
                    drop(attempt, why_failed(error))
        for attempt in [key.data for key in selector.get_map().values()]:
            what = "the connection alone answers" if attempt.is_greeted else "no answer"
            drop(attempt, f"{what} in {CONNECT_TIMEOUT:g} s")
    return answered, errors


def _connecting(address: str, port: int) -> socket.socket:
    """Return a socket that is connecting to a numeric address."""
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    family, kind, _, _, sockaddr = found[0]
    sock = socket.socket(family, kind)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.connect(sockaddr)
    except BlockingIOError:
        pass
    except OSError:
        sock.close()
        raise
    return sock


def _latency(sock: socket.socket) -> float:
    """Return the median of the round trips of pings, in seconds; ECHO_TIMEOUT if the connection stalls or ends."""
    trips: list[float] = []
    until = time.perf_counter() + ECHO_TIMEOUT
    for _ in range(PINGS):
        began = time.perf_counter()
        # on a slow way fewer will do: the server takes the first bytes that follow for pings, and nobody reads their echo
        if trips and began > until:
            break
        try:
            sock.sendall(b".")
            _receive(sock, 1)
        except OSError:
            return ECHO_TIMEOUT
        trips.append(time.perf_counter() - began)
    return sorted(trips)[len(trips) // 2]


def _speed(sock: socket.socket, seconds: float) -> tuple[float, float | None]:
    """Send for so many seconds; return the bytes a second that arrived, and the share of packets that were sent again.

    The speed is that of the best part of the time, since processors that are busy with something else make each part slower.
    The share is None if too few packets were sent to tell.
    """
    block = bytes(_BLOCK)
    part = seconds / _PARTS
    sock.settimeout(part)
    marks = [(time.perf_counter(), _tcp_info(sock).confirmed)]  # when, and bytes until then
    until = marks[0][0] + seconds
    try:
        while (now := time.perf_counter()) < until:
            if now - marks[-1][0] >= part:
                marks.append((now, _tcp_info(sock).confirmed))
            with suppress(TimeoutError):  # nothing more is taken at the moment
                sock.send(block)
    except OSError:  # the other side has closed
        pass
    total = _tcp_info(sock)
    marks.append((time.perf_counter(), total.confirmed))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # what still waits is dropped
    rates = [
        (bytes_2 - bytes_1) / (at_2 - at_1)
        for (at_1, bytes_1), (at_2, bytes_2) in pairwise(marks)
        if at_2 - at_1 >= part / 2  # the last part may be short, and a burst in it would be the best
    ]
    resent = min(1.0, total.resent / total.packets) if total.packets >= _FEW_PACKETS else None
    return max(rates, default=0.0), resent


class _TcpInfo(NamedTuple):
    """What the kernel has counted on a connection."""

    confirmed: int  # bytes that the other side has acknowledged
    resent: int  # packets that were sent again
    packets: int  # all that carried data


def _tcp_info(sock: socket.socket) -> _TcpInfo:
    """Ask the kernel. Linux counts all of it since 4.6."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
    info = info.ljust(_TCP_INFO_SIZE, b"\0")
    (confirmed,) = struct.unpack_from("=Q", info, _BYTES_ACKED)
    (resent,) = struct.unpack_from("=I", info, _TOTAL_RETRANS)
    (packets,) = struct.unpack_from("=I", info, _DATA_SEGS_OUT)
    return _TcpInfo(confirmed, resent, packets)


def _mtu(sock: socket.socket) -> int:
    """Return the bytes of the largest packet of a connection, as far as the kernel has learnt it; 0 if it does not tell."""
    try:
        if sock.family == socket.AF_INET or sock.getpeername()[0].startswith("::ffff:"):
            return sock.getsockopt(socket.IPPROTO_IP, _IP_MTU)
        return sock.getsockopt(socket.IPPROTO_IPV6, _IPV6_MTU)
    except OSError:
        return 0
