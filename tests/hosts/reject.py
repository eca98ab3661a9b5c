"""In a network of its own: dials a host behind a firewall that rejects, and prints why that failed. The argument is 4 or 6."""

import socket
import struct
import subprocess
import sys

from ddplaunch.reach.channel.dialer import Dialer, DialResult
from ddplaunch.reach.channel.handshake import Key
from ddplaunch.system.loop.loop import Loop

HERE, THERE, PREFIX = {"4": ("10.99.0.1", "10.99.0.2", "24"), "6": ("fd99::1", "fd99::2", "64")}[sys.argv[1]]
FAMILY = socket.AF_INET6 if ":" in HERE else socket.AF_INET
IP = (
    "link set lo up",
    "link add here type veth peer name there",
    f"address add {HERE}/{PREFIX} dev here" + " nodad" * (":" in HERE),
    "link set here up",
    "link set there up",
    f"neighbour add {THERE} lladdr 02:00:00:00:00:01 dev here",
)


def reject(packet: bytes) -> None:
    """Answer the first packet of a connection as `iptables -j REJECT` does."""
    if FAMILY == socket.AF_INET6:
        with socket.socket(FAMILY, socket.SOCK_RAW, socket.IPPROTO_ICMPV6) as raw:
            raw.sendto(struct.pack("!BBHI", 1, 4, 0, 0) + packet[:60], (HERE, 0))
        return
    message = struct.pack("!BBHI", 3, 3, 0, 0) + packet[: 4 * (packet[0] & 15) + 8]
    total = sum(struct.unpack(f"!{len(message) // 2}H", message))
    total = (total >> 16) + (total & 0xFFFF)
    with socket.socket(FAMILY, socket.SOCK_RAW, socket.IPPROTO_ICMP) as raw:
        raw.sendto(message[:2] + struct.pack("!H", ~(total + (total >> 16)) & 0xFFFF) + message[4:], (HERE, 0))


for words in IP:
    subprocess.run(["ip", *words.split()], check=True)
ethertype = 0x86DD if FAMILY == socket.AF_INET6 else 0x0800
protocol_at, tcp = (6, 6) if FAMILY == socket.AF_INET6 else (9, 6)
result, loop = DialResult(), Loop()
with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ethertype)) as wire:
    wire.bind(("there", 0))

    def on_packet() -> None:
        packet = wire.recv(2000)
        if packet[protocol_at] == tcp:
            reject(packet)

    loop.watch(wire, on_packet)
    dialer = Dialer(loop, Key(b""), result, tcp_user_timeout=10)
    dialer.set_targets([(FAMILY, (THERE, 4242))])
    while not result.reasons:
        loop.run_once()
    dialer.stop()
print(*result.reasons.values())
