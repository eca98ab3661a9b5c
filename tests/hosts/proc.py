"""What /proc tells about processes and sockets of a host, seen from outside it."""

import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process of a host."""

    pid: int  # here, outside: for os.kill
    inside: int  # on its host
    name: str  # of the program, 15 characters at most
    command: str


class Listener(NamedTuple):
    """A socket on which somebody may be spoken to."""

    protocol: str  # tcp, tcp6, udp, udp6
    address: str
    port: int


def children(pid: int) -> list[int]:
    """The processes whose parent is `pid`."""
    found = []
    for entry in _pids():
        try:
            after_name = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2]
        except OSError:
            continue
        if int(after_name.split()[1]) == pid:
            found.append(entry)
    return found


def processes(init: int) -> list[Process]:
    """The processes in the PID namespace of `init`, itself and zombies aside."""
    namespace = os.stat(f"/proc/{init}/ns/pid").st_ino
    found = []
    for pid in _pids():
        try:
            if pid == init or os.stat(f"/proc/{pid}/ns/pid").st_ino != namespace:
                continue
            status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it has ended meanwhile
            continue
        if not status["State"].startswith(("Z", "X")):
            inside = int(status["NSpid"].split()[-1])
            found.append(Process(pid, inside, status["Name"], command or status["Name"]))
    return found


def listeners(init: int) -> list[Listener]:
    """The listening TCP sockets and the bound UDP sockets in the network namespace of `init`."""
    found = []
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        file = Path(f"/proc/{init}/net/{protocol}")
        for line in file.read_text().splitlines()[1:] if file.exists() else ():
            _, local, _, state, *_ = line.split()
            if protocol.startswith("udp") or state == "0A":
                address, port = local.split(":")
                found.append(Listener(protocol, _address(address), int(port, 16)))
    return found


def _address(text: str) -> str:
    """The address that /proc/net writes as 32-bit words in the byte order of the machine."""
    raw = b"".join(struct.pack("=I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8))
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
