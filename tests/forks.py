"""Programs that run as forked workers, and commands of ours: those that begin alike are forked by the same fork server."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock

from tests.conftest import PATIENCE, PROGRAMS, Job, Result

ROOT = Path(__file__).parents[1]
BOOTSTRAP = ROOT / "ddplaunch" / "worker" / "bootstrap.py"
OF_START = ("LD_LIBRARY_PATH", "PYTHONPATH")  # variables that have their effect at the start of a process


class Forks:
    """Fork servers that have imported these modules, each behind an agent of its own; they live until `close`."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._agents: dict[str, tuple[subprocess.Popen[bytes], socket.socket]] = {}
        self._lock = Lock()

    def run(
        self, argv: Sequence[str], cwd: Path, env: Mapping[str, str], own: Mapping[str, str], stdin: bytes = b""
    ) -> tuple[int, bytes, bytes]:
        """The exit status, stdout and stderr of a program; `own` are variables that the server does not have."""
        (stdin_of, to_stdin), (out, out_of), (err, err_of) = os.pipe(), os.pipe(), os.pipe()
        with self._lock, ThreadPoolExecutor() as readers:
            _, agent = self._agent(cwd, env)
            socket.send_fds(agent, [json.dumps([argv, dict(env), dict(own)]).encode()], [stdin_of, out_of, err_of])
            for fd in (stdin_of, out_of, err_of):
                os.close(fd)
            with suppress(BrokenPipeError), open(to_stdin, "wb", buffering=0) as file:
                file.write(stdin)
            stdout, stderr = readers.map(_read, (out, err))
            return int(agent.recv(16)), stdout, stderr

    def _agent(self, cwd: Path, env: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """That of the programs which begin like this; it starts its server with the first of them."""
        key = json.dumps([str(cwd), sorted(item for item in env.items() if item[0] != "PYTEST_CURRENT_TEST")])
        if key not in self._agents:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.settimeout(PATIENCE)
            with theirs:
                command = [sys.executable, str(PROGRAMS / "forks.py"), *self._modules]
                agent = subprocess.Popen(
                    command, stdin=theirs.fileno(), cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT)}
                )
            self._agents[key] = agent, ours
        return self._agents[key]

    def close(self) -> None:
        """End them, and wait for that."""
        for agent, connection in self._agents.values():
            connection.close()
            assert agent.wait(PATIENCE) == 0


class Commands:
    """Runs commands that start no process, so that nothing is to be seen of one but what it prints and its status."""

    def __init__(self) -> None:
        self._forks = Forks("ddplaunch.__main__", "ddplaunch.launcher.start.preview", "ddplaunch.plan.devices.nvidia")

    def run(self, job: Job, *args: object, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Result:
        """Do what `Job.run` does, in a tenth of its time."""
        began = time.monotonic()
        whole = {**job.env, **(env or {})}
        of_start: dict[str, str] = {name: whole[name] for name in OF_START if name in whole}
        argv = [sys.executable, BOOTSTRAP, "script", PROGRAMS / "typed.py", cwd or job.home, *args]
        status, out, err = self._forks.run(list(map(str, argv)), PROGRAMS, of_start, whole)
        text = [printed.decode(errors="replace") for printed in (out, err)]
        return Result(status, text[0], text[1], time.monotonic() - began)

    def close(self) -> None:
        """End what it has started."""
        self._forks.close()


def _read(fd: int) -> bytes:
    with open(fd, "rb") as file:
        return file.read()
