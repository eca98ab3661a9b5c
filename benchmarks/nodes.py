"""What several nodes cost: their common start, a crash on one of them, and a coordinator with a thousand agents."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from bed import Bed, Figure, best, program

_NODES = 3
_PATIENCE = 6  # seconds that torchrun's other workers compute before they notice anything
_AGENTS = 1000


def start(bed: Bed) -> Iterator[Figure]:
    """Three agents on this machine meet, start a worker each that does nothing, and end; against three that do not meet."""
    rounds = bed.rounds(9)
    together, apart = best(
        rounds,
        lambda: _all_end(bed, _by_hand(bed, "--nproc-per-node", "1", program("nothing"))),
        lambda: _all_end(bed, [[*bed.ddplaunch, "--nproc-per-node", "1", program("nothing")]] * _NODES),
    )
    how = f"{together * 1e3:.0f} ms, not meeting {apart * 1e3:.0f} ms; best of {rounds}"
    name = "3 nodes: the common start and end add"
    yield Figure(name=name, value=(together - apart) * 1e3, unit="ms", target=100, how=how)


def crash(bed: Bed) -> Iterator[Figure]:
    """The last of 3 x 2 workers crashes while the others compute and do not communicate."""
    rounds = bed.rounds(6)
    (mine,) = best(rounds, lambda: _after_crash(bed, "ours"))
    (theirs,) = best(1, lambda: _after_crash(bed, "torchrun"))
    how = f"best of {rounds}; torchrun {theirs:.1f} s: when the others' work of {_PATIENCE} s was done"
    name = "crash on one of 3 nodes: all others gone after"
    yield Figure(name=name, value=mine * 1e3, unit="ms", target=300, how=how)


def thousand(bed: Bed) -> Iterator[Figure]:
    """One coordinator and a thousand agents without workers, on loopback."""
    port = _free_ports(8)
    words = ["--nnodes", str(_AGENTS + 1), "--node-rank", "0", "--master-addr", "127.0.0.1"]
    words += ["--master-port", str(port), "--nproc-per-node", "1", program("waits"), str(bed.folder), "wait"]
    command = bed.start([*bed.ddplaunch, *words])
    _listens(port + 1)
    agents = bed.start([*bed.python, program("agents"), str(port + 1), "1", str(_AGENTS), "6"], stdout=subprocess.PIPE)
    time.sleep(2.0)  # all have begun long ago
    (coordinator,) = _children(command.pid)
    before, at = _cpu_seconds(coordinator), time.monotonic()
    time.sleep(3.0)
    idle = (_cpu_seconds(coordinator) - before) / (time.monotonic() - at)
    memory = _resident(coordinator)
    said = json.loads(agents.communicate()[0])
    status = command.wait()
    assert status == 7, f"the job ended with {status}, not with the failing agent's 7"
    took = said["all_begun"] - said["began"]
    yield Figure(name="1,000 agents: all joined and started after", value=took, unit="s", target=5)
    told = said["all_stopped"] - said["failed"]
    yield Figure(name="1,000 agents: a failure reaches all after", value=told * 1e3, unit="ms", target=250)
    yield Figure(name="1,000 agents: memory of the coordinator", value=memory, unit="MB", target=150)
    yield Figure(name="1,000 agents: idle cost of the coordinator", value=idle * 100, unit="% of a core", target=5)


def _by_hand(bed: Bed, *words: str) -> list[list[str]]:
    port = str(_free_ports(10))
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
            port = str(_free_ports(1))
            words = ["--nnodes", str(_NODES), "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
            words += [f"127.0.0.1:{port}", program("waits"), folder, "crash", f"compute={_PATIENCE}"]
            commands = [[*bed.torchrun, *words]] * _NODES
        _all_end(bed, commands, 3, 1, 0)
        now = time.monotonic()
        assert not (left := bed.left()), f"{launcher} left processes: {left}"
        return now - float(Path(folder, "crashed").read_text())


def _free_ports(number: int) -> int:
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


def _listens(port: int) -> None:
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
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
