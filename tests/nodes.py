"""A job of several nodes on one machine: the command is started once for each, and they meet over loopback."""

import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Job, Result, events_in, until

BLOCK = 10  # ports of one job: MASTER_PORT, and those where the agents may meet
ENOUGH = 30.0  # seconds, on a machine that has other things to do


def catches(proc: Path, signum: int) -> bool:
    """Whether a process has a handler for a signal; `proc` is its folder in /proc."""
    mask = (proc / "status").read_text().partition("SigCgt:")[2].split()[0]
    return bool(int(mask, 16) >> (signum - 1) & 1)


@dataclass
class Node:
    """The command on one node; what it prints goes to files, so that nobody has to read it."""

    process: subprocess.Popen[bytes]
    output: Path  # and .err
    began: float

    @property
    def out(self) -> str:
        """What it has written to stdout so far."""
        return self.output.with_suffix(".out").read_text(errors="replace")

    @property
    def err(self) -> str:
        """What it has written to stderr so far."""
        return self.output.with_suffix(".err").read_text(errors="replace")

    @property
    def agent(self) -> int:
        """The pid of its agent."""
        proc = Path(f"/proc/{self.process.pid}")
        until(lambda: catches(proc, signal.SIGTERM), "a front that handles signals")  # earlier children ask a disk
        children = proc / "task" / proc.name / "children"
        return int(until(lambda: children.read_text().split(), "an agent")[-1])

    @property
    def has_ended(self) -> bool:
        """Whether the command has ended."""
        return self.process.poll() is not None

    def says(self, words: str) -> None:
        """Wait until it has written this to stderr."""
        until(lambda: words in self.err, f"{words!r} in {self.err!r}", ENOUGH)


@dataclass
class Nodes(Job):
    """One job of several nodes."""

    port: int = field(kw_only=True)  # the first of a block that is this job's own
    started: list[Node] = field(default_factory=list)

    def static(self, nnodes: object, node_rank: int) -> list[object]:
        """The flags with which a node is told its rank."""
        return ["--nnodes", nnodes, "--node-rank", node_rank, "--master-addr", "127.0.0.1", "--master-port", self.port]

    def c10d(self, nnodes: object, host: str = "localhost") -> list[object]:
        """The flags with which nodes get their ranks in order of arrival."""
        return ["--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{self.port}"]

    def node(self, *args: object, env: dict[str, str] | None = None, **popen: Any) -> Node:
        """Start the command on one more node."""
        for name in ("state", "tmp", "signs", "output"):
            (self.home / name).mkdir(exist_ok=True)
        output = self.home / "output" / f"node-{len(self.started)}"
        with output.with_suffix(".out").open("wb") as out, output.with_suffix(".err").open("wb") as err:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, "cwd": self.home}
            process = subprocess.Popen(self.argv(*args), env={**self.env, **(env or {})}, **{**streams, **popen})
        node = Node(process, output, time.monotonic())
        self.started.append(node)
        return node

    def static_nodes(self, number: int, *args: object, **popen: Any) -> list[Node]:
        """Start the command on so many nodes, each with its rank."""
        return [self.node(*self.static(number, place), *args, **popen) for place in range(number)]

    def ends(self, *nodes: Node, timeout: float = ENOUGH) -> list[Result]:
        """Wait until the command has ended on these nodes, on all if none is named, `timeout` seconds at most."""
        awaited = nodes or tuple(self.started)
        give_up = time.monotonic() + timeout
        results = []
        for node in awaited:
            try:
                node.process.wait(max(0.0, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                said = "".join(f"--- {each.process.poll()}\n{each.out}{each.err}" for each in self.started)
                pytest.fail(f"a node did not end within {timeout:g} s\n{said}")
            results.append(Result(node.process.returncode, node.out, node.err, time.monotonic() - node.began))
        return results

    def statuses(self, *nodes: Node, timeout: float = ENOUGH) -> list[int]:
        """Wait as `ends` does, and return the exit statuses."""
        return [result.status for result in self.ends(*nodes, timeout=timeout)]

    def place(self, rank: int, generation: int | None = None) -> dict[str, Any]:
        """What a worker of place.py or restarts.py has put up."""
        name = f"place-{rank}" if generation is None else f"place-{generation}-{rank}"
        place: dict[str, Any] = json.loads(self.sign(name))
        variables: dict[str, Any] = place.get("variables", place)
        return variables

    def listens(self, number: int = 0) -> None:
        """Wait until somebody listens at this port of the job's own."""
        # looked for, since to try the port would keep it from others
        until(lambda: _is_listened_at(self.port + number), "a coordinator")

    def answers(self, number: int = 0) -> None:
        """Wait until a coordinator says its first word at this port of the job's own: it listens before it is ready."""
        self.listens(number)
        with socket.create_connection(("127.0.0.1", self.port + number), ENOUGH) as probe:
            assert probe.recv(1)

    def have_joined(self, number: int) -> None:
        """Wait until so many agents have joined the job, which has begun."""
        until(lambda: len(self.events_of(0, "node_joined")) == number, f"{number} nodes")

    # --- the run folder

    def folder_of(self, node_rank: int) -> Path:
        """The folder of a node in that of the latest run."""
        return self.folder / f"node-{node_rank}"

    def events_of(self, node_rank: int, *names: str) -> list[dict[str, Any]]:
        """The events of a node that have been written, all or those of these names."""
        return events_in(self.folder_of(node_rank), *names)

    def ports(self) -> list[int]:
        """Every port that the job may have listened on."""
        files = self.home.glob("state*/ddplaunch/runs/*/node-*/events.jsonl")
        events = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        own = range(self.port, self.port + BLOCK)
        return [*own, *{event["master_port"] for event in events if event["event"] == "generation_started"} - set(own)]

    def kill_all(self) -> None:
        """End whatever a failed test has left."""
        for pid in self.left():
            for signum in (signal.SIGKILL, signal.SIGCONT):
                try:
                    os.kill(pid, signum)
                except ProcessLookupError:
                    pass
        for node in self.started:
            node.process.kill()
            node.process.wait()


def several(home: Path) -> Iterator[Nodes]:
    """A job of several nodes; whatever the test leaves of it is an error, and is ended."""
    port, claim = free_block()
    nodes = Nodes(home, port=port)
    with claim:
        yield nodes
        try:
            nodes.nothing_left()
        finally:
            nodes.kill_all()
            for node in nodes.started:  # shown if the test has failed
                print(f"--- {node.process.args!r} ended with {node.process.poll()}\n{node.out}{node.err}")


def free_ports(ports: Sequence[int]) -> bool:
    """Whether nobody has any of these ports."""
    for port in ports:
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                return False
    return True


_LISTEN = "0A"  # of proc_net_tcp in the kernel's documentation


def _is_listened_at(port: int) -> bool:
    """Whether somebody listens at this port."""
    lines = [
        line.split() for family in ("tcp", "tcp6") for line in Path(f"/proc/net/{family}").read_text().splitlines()
    ]
    return any(words[1].endswith(f":{port:04X}") and words[3] == _LISTEN for words in lines)


def free_block() -> tuple[int, socket.socket]:
    """Find ports that are free, and keep other tests from them as long as the socket is open."""
    # below what Linux hands out on its own, and below what ddplaunch chooses itself
    for port in random.sample(range(10_000, 20_000, BLOCK), 200):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0ddplaunch-tests-{port}")
        except OSError:  # another run of the tests has it
            claim.close()
            continue
        if free_ports(range(port, port + BLOCK)):
            return port, claim
        claim.close()
    raise AssertionError("no block of ports is free")
