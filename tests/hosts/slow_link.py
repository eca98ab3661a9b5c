"""A link that takes its time: carries every frame between two network interfaces late, and loses some.

`python slow_link.py INTERFACE INTERFACE MILLISECONDS LOSS_PERCENT [FIRST-LAST]`, each way; says `ready` on stdout. It stands in
for tc's netem, which many kernels lack. It shapes no rate and keeps the order of frames. What begins a TCP connection from the
second interface to one of these ports is lost, as at a firewall.
"""

import random
import select
import socket
import sys
import time
from collections import deque

# linux/if_packet.h, asm-generic/socket.h
SOL_PACKET, PACKET_ADD_MEMBERSHIP, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 1, 15, 23
PACKET_MR_PROMISC, ETH_P_ALL = 1, 3
SO_RCVBUFFORCE = 33
LONGEST = 1 << 17  # bytes: with offloading, one frame may hold 64 KiB and its headers


def plug(interface: str) -> socket.socket:
    """Open an interface for whole frames."""
    plugged = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    # the kernel hands over frames longer than the wire's and without checksums, and says so in a header; without that header
    # they could not be sent on
    plugged.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    plugged.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    plugged.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 8 << 20)
    plugged.bind((interface, ETH_P_ALL))
    index = socket.if_nametoindex(interface).to_bytes(4, sys.byteorder)
    promiscuous = index + PACKET_MR_PROMISC.to_bytes(2, sys.byteorder) + bytes(10)
    plugged.setsockopt(SOL_PACKET, PACKET_ADD_MEMBERSHIP, promiscuous)
    plugged.setblocking(False)
    return plugged


def frames(plugged: socket.socket) -> list[bytes]:
    """All frames that have come in."""
    come = []
    while True:
        try:
            come.append(plugged.recv(LONGEST))
        except OSError:  # no more; or the interface has gone down, which is told once
            return come


def begins_at(frame: bytes) -> int | None:
    """The port to which this frame, behind its header of 10 bytes, begins a TCP connection; None: it does not."""
    kind, packet = frame[22:24], frame[24:]
    if kind == b"\x08\x00" and packet[9] == socket.IPPROTO_TCP:
        segment = packet[4 * (packet[0] & 15) :]
    elif kind == b"\x86\xdd" and packet[6] == socket.IPPROTO_TCP:
        segment = packet[40:]
    else:
        return None
    return int.from_bytes(segment[2:4]) if segment[13] & 0x12 == 2 else None  # SYN without ACK


def main(one: str, other: str, milliseconds: str, percent: str, closed: str = "0-0") -> None:
    """Carry frames until killed."""
    delay, loss = float(milliseconds) / 1000, float(percent) / 100
    first, last = map(int, closed.split("-"))
    ends = (plug(one), plug(other))
    across = {ends[0]: ends[1], ends[1]: ends[0]}
    on_the_way: deque[tuple[float, socket.socket, bytes]] = deque()
    print("ready", flush=True)
    while True:
        patience = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
        for end in select.select(ends, (), (), patience)[0]:
            kept = [frame for frame in frames(end) if random.random() >= loss]
            if last and end is ends[1]:
                kept = [frame for frame in kept if not first <= (begins_at(frame) or 0) <= last]
            on_the_way.extend((time.monotonic() + delay, across[end], frame) for frame in kept)
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            _, end, frame = on_the_way.popleft()
            try:
                end.send(frame)
            except OSError:  # the interface is down or full: the frame is lost, as on any link
                pass


if __name__ == "__main__":
    main(*sys.argv[1:])
