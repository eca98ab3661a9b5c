"""One host: namespaces of its own, kept by a process 1 of its own, and the programs that are run inside.

It knows nothing of networks: who plugs cables into it is the bed.
"""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.conftest import PATIENCE, until
from tests.hosts import proc

INIT = Path(__file__).parent / "host_init.py"
NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")

Files = dict[str, tuple[str, int]]  # path: content (bytes as latin-1), mode
Daemons = list[tuple[Sequence[str], str]]  # argv, the pid file that it writes when it serves


@dataclass(frozen=True, kw_only=True)
class Services:
    """What a host has and runs besides what every host does."""

    files: Files = field(default_factory=dict)
    daemons: Daemons = field(default_factory=list)
    names: tuple[str, ...] = ()  # how the names of the daemons' processes begin


def time_namespaces() -> bool:
    """Whether a monotonic clock can be moved here."""
    probe = ["unshare", "--time", "--monotonic=1", "--boottime=1", "--fork", "--", "true"]
    return subprocess.run(probe, stderr=subprocess.DEVNULL, check=False).returncode == 0


class Command(subprocess.Popen[bytes]):
    """A program inside a host. Signals go to it, and its status is its own, though nsenter stands between.

    As a context manager it kills a program that still runs at the end.
    """

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        super().__exit__(kind, error, traceback)

    def inside(self) -> int | None:
        """The program's pid, as seen outside; None: it has ended."""
        found = until(lambda: self.poll() is not None or proc.children(self.pid), f"{self.args!r} to start")
        return None if found is True else int(found[0])

    def send_signal(self, sig: int) -> None:
        """Send a signal to the program, which nsenter would not pass on."""
        if (pid := self.inside()) is None:
            return
        try:
            os.kill(pid, sig)
            if sig in (signal.SIGCONT, signal.SIGKILL):
                os.kill(self.pid, signal.SIGCONT)  # nsenter stops itself when the program is stopped
        except ProcessLookupError:
            pass


class Host:
    """A host, on or off; the bed's switch is one too."""

    def __init__(self, name: str, log: Path, uptime: int = 0, ends_with_it: Path | None = None) -> None:
        self.name = name
        self.log = log
        self.ends_with_it = ends_with_it  # a folder that its process 1 removes at its end
        self.uptime = uptime  # seconds that its monotonic clock is ahead of ours
        self.pid = 0  # of its process 1, outside
        self.commands: list[Command] = []
        self._namespaces: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    @property
    def is_on(self) -> bool:
        """Whether its process 1 lives."""
        return self._namespaces is not None and self._namespaces.poll() is None

    # --- on and off

    def power_on(self) -> None:
        """Make the namespaces; more hosts can do it at the same time, so it does not wait."""
        clock = ("--time", f"--monotonic={self.uptime}", f"--boottime={self.uptime}") if self.uptime else ()
        self._channel, theirs = socket.socketpair()
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._channel.settimeout(PATIENCE)
        with theirs, self.log.open("wb") as log:
            self._namespaces = subprocess.Popen(
                ["unshare", *NAMESPACES, *clock, "--", sys.executable, "-I", "-S", str(INIT)],
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in a terminal is for pytest, which then ends us in order
            )

    def wait_here(self) -> None:
        """Wait until its process 1 runs: from then on it has a pid."""
        self.pid = self._wait_said(b"here\n")

    def set_up(self, files: Files, network: str, daemons: Daemons) -> None:
        """Say what files it gets, how its network cards are set (for `ip -batch`) and what it runs."""
        assert self._channel is not None
        remove = str(self.ends_with_it) if self.ends_with_it else None
        wanted = {"name": self.name, "files": files, "network": network, "daemons": daemons, "remove": remove}
        self._channel.sendall(json.dumps(wanted).encode() + b"\n")

    def wait_up(self) -> None:
        """Wait until all that has been done."""
        self._wait_said(b"up\n")

    def _wait_said(self, word: bytes) -> int:
        """Wait for this word of its process 1, and give the pid that it has outside."""
        assert self._channel is not None
        try:
            said, ancillary, _, _ = self._channel.recvmsg(64, socket.CMSG_SPACE(struct.calcsize("3i")))
        except ConnectionResetError:  # it has ended without reading all that we said
            said, ancillary = b"", []
        assert said == word, f"{self.name} does not start: {self.log.read_text()}"
        return int(struct.unpack("3i", ancillary[0][2])[0])  # pid, uid, gid, as the kernel translates them for us

    def kill(self) -> None:
        """End all processes of the host at once; the namespaces go with them."""
        if self._namespaces is None or self._channel is None:
            return
        if self.is_on and self.pid:
            os.kill(self.pid, signal.SIGKILL)
        self._channel.close()  # this alone would end it too
        self._namespaces.wait(PATIENCE)
        self._namespaces = self._channel = None
        self.end_commands()
        self.pid = 0

    # --- what runs on it

    def start(self, argv: Sequence[object], env: Mapping[str, str], cwd: Path, **popen: Any) -> Command:
        """Start a program on it."""
        assert self.is_on, f"{self.name} is off"
        enter = ["nsenter", "--target", str(self.pid), "--all", "--", "env", "-C", str(cwd)]
        command = Command([*enter, *map(str, argv)], env=env, **{"stdin": subprocess.DEVNULL, **popen})
        self.commands = [*(command for command in self.commands if command.poll() is None), command]
        return command

    def end_commands(self) -> None:
        """End all programs that were started from outside, and wait for them."""
        for command in self.commands:
            command.kill()
            command.wait(PATIENCE)
        self.commands = []

    def path(self, path: str) -> Path:
        """Where a file of the host is found from outside."""
        return Path(f"/proc/{self.pid}/root{path}")
