"""What several nodes cost: their common start, a crash on one of them, and a coordinator with thousands of agents."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from bed import Bed, Figure, Rounds, program

_NODES = 3
_PATIENCE = 6  # seconds that torchrun's other workers compute before they notice anything


def start(bed: Bed) -> Iterator[Figure]:
    """Three agents on this machine meet, start a worker each that does nothing, and end; against three that do not meet."""
    rounds = bed.rounds(9)
    taken = Rounds(
        rounds,
        lambda: _all_end(bed, _by_hand(bed, "--nproc-per-node", "1", program("nothing"))),
        lambda: _all_end(bed, [[*bed.ddplaunch, "--nproc-per-node", "1", program("nothing")]] * _NODES),
    )
    together, apart = taken.medians()
    how = f"{together * 1e3:.0f} ms, not meeting {apart * 1e3:.0f} ms; {rounds} rounds"
    name = "3 nodes: the common start and end add"
    added = taken.of(lambda together, apart: (together - apart) * 1e3)
    yield Figure(name=name, value=added, unit="ms", target=100, how=how)


def crash(bed: Bed) -> Iterator[Figure]:
    """The last of 3 x 2 workers crashes while the others compute and do not communicate."""
    rounds = bed.rounds(6)
    mine = Rounds(rounds, lambda: _after_crash(bed, "ours")).of(lambda seconds: seconds * 1e3)
    theirs = _after_crash(bed, "torchrun")
    how = f"{rounds} rounds; torchrun {theirs:.1f} s: when the others' work of {_PATIENCE} s was done"
    name = "crash on one of 3 nodes: all others gone after"
    yield Figure(name=name, value=mine, unit="ms", target=300, how=how)


def many(bed: Bed) -> Iterator[Figure]:
    """One coordinator and thousands of agents without workers, on loopback."""
    yield from _agents(bed, 1000, joined=5, told=250, memory=150, idle=5)
    if not bed.quick:
        yield from _agents(bed, 10_000, joined=5, told=500, memory=300, idle=None)


def _agents(
    bed: Bed, number: int, *, joined: float, told: float, memory: float, idle: float | None
) -> Iterator[Figure]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if number + 100 > files:
        return  # this machine allows no process so many connections
    port = free_ports(8)
    words = ["--nnodes", str(number + 1), "--node-rank", "0", "--master-addr", "127.0.0.1"]
    words += ["--master-port", str(port), "--nproc-per-node", "1", program("waits"), str(bed.folder), "wait"]
    command = bed.start([*bed.ddplaunch, *words])
    _listens(port + 1, command)
    (coordinator,) = _children(command.pid)
    cpu = _cpu_seconds(coordinator)
    begun = bed.folder / "ready-0"  # of the coordinator's own worker
    agents = bed.start([*bed.python, program("agents"), str(port + 1), "1", str(number), "6"], stdout=subprocess.PIPE)
    while not begun.exists():
        assert command.poll() is None, f"the job ended with {command.returncode} before its agents had met"
        time.sleep(0.05)
    begun.unlink()
    meeting = _cpu_seconds(coordinator) - cpu
    time.sleep(1.0)
    before, at = _cpu_seconds(coordinator), time.monotonic()
    time.sleep(3.0)
    cost = (_cpu_seconds(coordinator) - before) / (time.monotonic() - at)
    resident = _resident(coordinator)
    said = json.loads(agents.communicate()[0])
    status = command.wait()
    assert status == 7, f"the job ended with {status}, not with the failing agent's 7"
    name = f"{number:,} agents"
    how = f"{meeting:.1f} s of the coordinator's CPU; one process plays all agents, and shares the machine"
    took = said["all_begun"] - said["began"]
    yield Figure(name=f"{name}: all joined and started after", value=took, unit="s", target=joined, how=how)
    reached = (said["all_stopped"] - said["failed"]) * 1e3
    yield Figure(name=f"{name}: a failure reaches all after", value=reached, unit="ms", target=told)
    yield Figure(name=f"{name}: memory of the coordinator", value=resident, unit="MB", target=memory)
    yield Figure(name=f"{name}: idle cost of the coordinator", value=cost * 100, unit="% of a core", target=idle)


def _by_hand(bed: Bed, *words: str) -> list[list[str]]:
    port = str(free_ports(10))
    common = ["--nnodes", str(_NODES), "--master-addr", "127.0.0.1", "--master-port", port]
    return [[*bed.ddplaunch, *common, "--node-rank", str(rank), *words] for rank in range(_NODES)]


def _all_end(bed: Bed, commands: Sequence[Sequence[str]], *statuses: int) -> float:
    began = time.perf_counter()
    ended = {command.wait() for command in [bed.start(argv) for argv in commands]}
    took = time.perf_counter() - began
    assert ended <= set(statuses or (0,)), f"{commands[0][0]} ended with {ended}"
    return took


def _after_crash(bed: Bed, launcher: str) -> float:
    with tempfile.TemporaryDirectory(dir=bed.folder) as folder:
        if launcher == "ours":
            commands = _by_hand(bed, "--nproc-per-node", "2", program("waits"), folder, "crash")
        else:
            port = str(free_ports(1))
            words = ["--nnodes", str(_NODES), "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
            words += [f"127.0.0.1:{port}", program("waits"), folder, "crash", f"compute={_PATIENCE}"]
            commands = [[*bed.torchrun, *words]] * _NODES
        _all_end(bed, commands, 3, 1, 0)
        now = time.monotonic()
        assert not (left := bed.left()), f"{launcher} left processes: {left}"
        return now - float(Path(folder, "crashed").read_text())


def free_ports(number: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = probe.getsockname()[1]
        with ExitStack() as held:
            try:
                for port in range(first, first + number):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return int(first)


def _listens(port: int, command: subprocess.Popen[bytes]) -> None:
    while True:
        assert command.poll() is None, f"the job ended with {command.returncode} before it listened"
        try:
            with socket.create_connection(("127.0.0.1", port)) as probe:
                probe.recv(1)  # it listens before it is ready
            return
        except OSError:
            time.sleep(0.01)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1000
