"""Measures the way to another node over TCP, and serves others that measure the way to this one. Needs no torch.

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

from ddplaunch.system.fields import host, line
from ddplaunch.system.net.port import for_all_addresses
from ddplaunch.system.words import why_failed
from ddplaunch.tools.doctor.nodes.messages import MAX_ADDRESSES, Blocked, Measure, Met, Way

CONNECT_TIMEOUT = 2.5  # seconds: the kernel sends a lost SYN again after 1 s
ECHO_TIMEOUT = 2.0  # seconds
PINGS = 21  # an odd number has a median
_PARTS = 6  # of the time in which data are sent
_ENOUGH = 1000  # packets, of which a lossy link loses a few: 1.5 MB
_MOST_CLIENTS = 512  # one node measures one other at a time, at all addresses and ports of that at once
_SILENCE = 5.0  # seconds after which a client is dropped
_BLOCK = 1 << 18  # bytes
_SEED, _PROOF = 16, 32  # bytes
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


def serve(streams: Sequence[socket.socket], token: str, node_rank: int) -> None:
    """Serve all that connect, each in a thread; never returns. Where too many are served, who comes then is shown out."""
    import threading  # of all processes only this one has threads

    free = threading.BoundedSemaphore(_MOST_CLIENTS)

    def serve_one(client: socket.socket) -> None:
        try:
            _serve_client(client, token, node_rank)
        finally:
            free.release()

    with selectors.DefaultSelector() as selector:
        for listening in streams:
            listening.setblocking(False)
            selector.register(listening, selectors.EVENT_READ, listening)
        while True:
            for key, _ in selector.select():
                with suppress(OSError):  # the client is gone
                    client = key.data.accept()[0]
                    if free.acquire(blocking=False):
                        threading.Thread(target=serve_one, args=(client,), daemon=True).start()
                    else:
                        client.close()


def _serve_client(client: socket.socket, token: str, node_rank: int) -> None:
    """Prove who this is, echo pings, and read what follows."""
    with closing(client), suppress(OSError):
        client.settimeout(_SILENCE)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = _receive(client, _SEED + _PROOF)
        if not hmac.compare_digest(hello[_SEED:], _proof(token, hello[:_SEED], -1)):
            return
        client.sendall(_proof(token, hello[:_SEED], node_rank))
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
    """Return what proves that the sender knows the token: as a server, the node of this rank; as a client, -1."""
    return hmac.digest(token.encode(), b"ddplaunch doctor %d %s" % (node_rank, seed), hashlib.sha256)


# --- the side that measures


Address = tuple[str, int]


def measure(request: Measure, token: str) -> Way:
    """Measure the way to a node: which of its addresses and ports answer, how soon, how fast."""
    targets = [(address, port) for address in request.addresses for port in request.ports]
    answered, errors = connect(targets, token, request.node_rank)
    try:
        # the first address under which the node answers at any port is the one that counts
        address = next((address for address, _ in targets if any(address == one for one, _ in answered)), None)
        if address is None:
            reasons = {port: why for (_, port), why in reversed(errors.items())}
            return Way(blocked=tuple(Blocked(port, why) for port, why in reasons.items()))
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
    """Resolve a name and connect to each of its addresses, to find out where node 0 answers."""
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # ValueError: not a host name at all
        return Met((), None, line(why_failed(error) if isinstance(error, OSError) else str(error)))
    addresses = [str(sockaddr[0]) for *_, sockaddr in found]
    addresses = list(dict.fromkeys(addresses))[:MAX_ADDRESSES]
    answered, errors = connect([(address, port) for address in addresses], token, 0)
    for sock in answered.values():
        sock.close()
    reached = next((address for address in addresses if (address, port) in answered), None)
    return Met(tuple(map(host, addresses)), reached and host(reached), ", ".join(dict.fromkeys(errors.values())))


def connect(
    targets: Sequence[Address], token: str, node_rank: int
) -> tuple[dict[Address, socket.socket], dict[Address, str]]:
    """Connect to all addresses at once; return the sockets whose peer has proved to be the node, and why the others failed."""
    answered: dict[Address, socket.socket] = {}
    errors: dict[Address, str] = {}
    seed = os.urandom(_SEED)
    hello, expected = seed + _proof(token, seed, -1), _proof(token, seed, node_rank)
    received: dict[Address, bytes] = {}
    until = time.monotonic() + CONNECT_TIMEOUT

    def drop(target: Address, sock: socket.socket, why: str) -> None:
        errors[target] = line(why)
        selector.unregister(sock)
        sock.close()

    with selectors.DefaultSelector() as selector:
        for at in targets:
            try:
                connecting = _connecting(*at)
            except OSError as error:
                errors[at] = line(why_failed(error))
            else:
                selector.register(connecting, selectors.EVENT_WRITE, (at, connecting))
        while selector.get_map() and (left := until - time.monotonic()) > 0:
            for key, events in selector.select(left):
                target, sock = key.data
                try:
                    if events & selectors.EVENT_WRITE:
                        if number := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                            raise OSError(number, os.strerror(number))
                        sock.send(hello)  # an empty socket takes it
                        selector.modify(sock, selectors.EVENT_READ, (target, sock))
                        continue
                    data = sock.recv(_PROOF - len(received.get(target, b"")))
                except OSError as error:
                    drop(target, sock, why_failed(error))
                    continue
                received[target] = received.get(target, b"") + data
                if received[target] == expected:
                    selector.unregister(sock)
                    answered[target] = sock
                elif not data or len(received[target]) == _PROOF:
                    drop(target, sock, "something else answers there")
        for key in list(selector.get_map().values()):
            what = "the connection alone answers" if key.events == selectors.EVENT_READ else "no answer"
            target, sock = key.data
            drop(target, sock, f"{what} in {CONNECT_TIMEOUT:g} s")
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
    """Return the median of the round trips, in seconds."""
    trips: list[float] = []
    until = time.perf_counter() + ECHO_TIMEOUT
    for _ in range(PINGS):
        began = time.perf_counter()
        if trips and began > until:  # what is sent next is echoed in part, and that is not read
            break
        try:
            sock.sendall(b".")
            _receive(sock, 1)
        except OSError:
            return ECHO_TIMEOUT
        trips.append(time.perf_counter() - began)
    return sorted(trips)[len(trips) // 2]


def _speed(sock: socket.socket, seconds: float) -> tuple[float, float | None]:
    """Send for so many seconds; return the bytes a second that arrived, and the share of packets that were sent again, if known.

    The speed is that of the best part of the time, since processors that are busy with something else make each part slower.
    """
    block = bytes(_BLOCK)
    part = seconds / _PARTS
    sock.settimeout(part)
    marks = [(time.perf_counter(), _tcp_info(sock)[0])]
    until = marks[0][0] + seconds
    try:
        while (now := time.perf_counter()) < until:
            if now - marks[-1][0] >= part:
                marks.append((now, _tcp_info(sock)[0]))
            with suppress(TimeoutError):  # nothing more is taken at the moment
                sock.send(block)
    except OSError:  # the other side has closed
        pass
    confirmed, resent, packets = _tcp_info(sock)
    marks.append((time.perf_counter(), confirmed))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # what still waits is dropped
    rates = [
        (bytes_2 - bytes_1) / (at_2 - at_1)
        for (at_1, bytes_1), (at_2, bytes_2) in pairwise(marks)
        if at_2 - at_1 >= part / 2
    ]
    return max(rates, default=0.0), min(1.0, resent / packets) if packets >= _ENOUGH else None


def _tcp_info(sock: socket.socket) -> tuple[int, int, int]:
    """Return the bytes that were confirmed, the packets that were sent again, and all packets. Linux has all since 4.6."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
    info = info.ljust(_TCP_INFO_SIZE, b"\0")
    (confirmed,) = struct.unpack_from("=Q", info, _BYTES_ACKED)
    (resent,) = struct.unpack_from("=I", info, _TOTAL_RETRANS)
    (packets,) = struct.unpack_from("=I", info, _DATA_SEGS_OUT)
    return confirmed, resent, packets


def _mtu(sock: socket.socket) -> int:
    """Return the bytes of the largest packet of a connection, as far as the kernel has learnt it; 0 if it does not tell."""
    try:
        if sock.family == socket.AF_INET or sock.getpeername()[0].startswith("::ffff:"):
            return sock.getsockopt(socket.IPPROTO_IP, _IP_MTU)
        return sock.getsockopt(socket.IPPROTO_IPV6, _IPV6_MTU)
    except OSError:
        return 0
