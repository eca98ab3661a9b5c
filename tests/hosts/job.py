"""The command as a test runs it on several hosts."""

import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conftest import PATIENCE, Job, Result, events_in, left_after, until
from tests.hosts.bed import Bed
from tests.hosts.host import Command

SOON = 20.0  # seconds, less than the grace period; most take 0.2, but others may keep the processors busy


@dataclass
class HostsJob(Job):
    """One job whose commands run on hosts of a bed; what they print goes to files, so that nobody has to read it."""

    bed: Bed = field(kw_only=True)
    commands: dict[str, Command] = field(default_factory=dict)  # the latest on each host
    begun: dict[str, float] = field(default_factory=dict)

    def start(self, *args: object, host: str | None = None, env: dict[str, str] | None = None, **popen: Any) -> Command:
        """Start the command on a host, the first if none is named."""
        host = host or self.bed.hosts[0]
        for name in ("state", "tmp", "signs", "output"):
            (self.home / name).mkdir(exist_ok=True)
        with self._file(host, "out").open("wb") as out, self._file(host, "err").open("wb") as err:
            environment = {**self.env, "HOME": str(self.bed.home), **(env or {})}
            streams = {"stdout": out, "stderr": err, "cwd": self.home}
            self.begun[host] = time.monotonic()
            self.commands[host] = self.bed.start(host, self.argv(*args), env=environment, **{**streams, **popen})
        self.process = self.commands[host]
        return self.commands[host]

    def start_each(self, *args: object, hosts: Sequence[str] | None = None, **popen: Any) -> dict[str, Command]:
        """Start the command on each host; `{node_rank}` in an argument becomes the place of the host in the bed."""
        return {
            host: self.start(*(_numbered(arg, self.bed.number(host)) for arg in args), host=host, **popen)
            for host in hosts or self.bed.alive
        }

    def by_hand(self, *args: object, address: str | None = None, **options: Any) -> None:
        """Start the command on each host, or on some, telling it its rank, and that node 0 is the first host."""
        hosts = self.bed.hosts
        told = ["--nnodes", len(hosts), "--node-rank", "{node_rank}", "--master-addr", address or hosts[0]]
        self.start_each(*told, *args, **options)

    def at_endpoint(self, *args: object, nnodes: object, hosts: Sequence[str] | None = None, **options: Any) -> None:
        """Start the command on each host, or on some, telling it to meet the others at the first host."""
        endpoint = f"{self.bed.hosts[0]}:29400"
        self.start_each(
            "--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, *args, hosts=hosts, **options
        )

    def put(self, *names: str) -> None:
        """Put up signs for workers to see."""
        (self.home / "signs").mkdir(exist_ok=True)
        for name in names:
            (self.home / "signs" / name).touch()

    def seconds_until_quiet(self, *hosts: str, since: float) -> float:
        """Wait until nothing of the job runs on these hosts, or on any; give how long that took."""
        until(lambda: not any(self.bed.processes(host) for host in hosts or self.bed.alive), "all processes to end")
        return time.monotonic() - since

    def wait(self, timeout: float = PATIENCE, *, host: str | None = None) -> Result:
        """Wait for the command on a host to end."""
        host = host or self.bed.hosts[0]
        command = self.commands[host]
        try:
            command.wait(timeout)
        except subprocess.TimeoutExpired as error:
            left = "\n".join(f"{name}: {process}" for name in self.bed.alive for process in self.bed.processes(name))
            said = "\n".join(f"--- {name}\n{self.out(name)}{self.err(name)}" for name in self.commands)
            self.kill_all()
            raise AssertionError(f"{host} did not end in {timeout:g} s\nleft:\n{left}\n{said}") from error
        return Result(command.returncode, self.out(host), self.err(host), time.monotonic() - self.begun[host])

    def wait_each(self, timeout: float = PATIENCE, hosts: Sequence[str] | None = None) -> dict[str, Result]:
        """Wait for the commands on all hosts, or some, to end within `timeout` seconds in all."""
        give_up = time.monotonic() + timeout
        return {
            host: self.wait(max(0.0, give_up - time.monotonic()), host=host) for host in hosts or list(self.commands)
        }

    def run(self, *args: object, timeout: float = PATIENCE, host: str | None = None, **popen: Any) -> Result:
        """Run the command on a host to its end."""
        self.start(*args, host=host, **popen)
        return self.wait(timeout, host=host)

    def out(self, host: str) -> str:
        """What the command on a host has written to stdout so far."""
        return self._file(host, "out").read_text(errors="replace")

    def err(self, host: str) -> str:
        """What the command on a host has written to stderr so far."""
        return self._file(host, "err").read_text(errors="replace")

    # --- the run folder

    def folder_of(self, host: str) -> Path:
        """The folder of a host in that of the latest run."""
        return self.folder / f"node-{self.bed.number(host)}"

    def events_of(self, host: str, *names: str) -> list[dict[str, Any]]:
        """The events of a host that have been written, all or those of these names."""
        return events_in(self.folder_of(host), *names)

    def summary_of(self, host: str) -> dict[str, Any]:
        """How the job ended, as a host has it."""
        summary: dict[str, Any] = json.loads((self.folder_of(host) / "summary.json").read_text())
        return summary

    def _file(self, host: str, stream: str) -> Path:
        return self.home / "output" / f"{host}.{stream}"

    # --- what is left

    def left_on(self, host: str) -> list[str]:
        """Whatever runs or listens on a host that is no part of it."""
        return [*map(str, self.bed.processes(host)), *map(str, self.bed.listeners(host))]

    def nothing_left(self, patience: float = 0.0) -> None:
        """Prove that no process, socket or temporary file remains on any host that is on."""
        left = left_after(patience, self._left_everywhere)
        assert not left, left

    def _left_everywhere(self) -> dict[str, list[str]]:
        left = {host: self.left_on(host) for host in self.bed.alive}
        left["tmp"] = [str(path) for path in (self.home / "tmp").glob("*")]
        return {where: what for where, what in left.items() if what}


def _numbered(arg: object, number: int) -> str:
    return str(arg).replace("{node_rank}", str(number))
