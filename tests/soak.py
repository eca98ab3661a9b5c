"""`make soak MINUTES=30`: trainings on nodes that come and go under random faults, each of which must end with the exact result.

A round starts some agents of an elastic job on this machine and, from its seed, kills, stops, continues, leaves and joins; node 0
is no exception. Then nothing disturbs it any more: the training must end with status 0 on each node that nothing was done to, and
with the weights of an undisturbed one, and leave nothing.
`python -m tests.soak --seed N` runs one round again; what the kernel does meanwhile differs, the faults are the same.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.conftest import PROGRAMS, Job, until
from tests.nodes import Node, Nodes, free_block
from tests.torch.example import QUICK

STEPS = 120
PROGRAM = (PROGRAMS / "exact_training.py", STEPS, "slow")
SILENCE = 3  # seconds, the heartbeat timeout
MOST = 4  # nodes
PATIENCE = 180.0  # seconds until a training that nobody disturbs any more has ended


class Round:
    """One training and what is done to it."""

    def __init__(self, home: Path, seed: int) -> None:
        """Prepare a training in this folder."""
        port, self._claim = free_block()
        self.nodes = Nodes(home, port=port)
        self.dice = random.Random(seed)
        self.spares = self.dice.choice((0, 0, 1))
        self.faults = self.dice.randint(2, 6)
        self.done: list[str] = []
        self.workers: list[int] = []  # of each node
        self.hurt: set[int] = set()  # nodes that may end otherwise than the job
        self.members: set[int] = set()  # nodes that have begun a generation together, and were not hurt since
        self.missed = 0  # nodes that were hurt since

    def run(self, expected: str) -> None:
        """Train under faults, then in peace, and prove the result."""
        try:
            for _ in range(self.dice.randint(2, MOST)):
                self.join()
            until(lambda: list((self.nodes.home / "signs").glob("from-*-0")), "the first step", PATIENCE)
            for _ in range(self.faults):
                time.sleep(self.dice.uniform(0.1, 4.0))
                self.disturb()
            self.in_peace(expected)
            self.nodes.nothing_left(10.0)
        finally:
            self.nodes.kill_all()
            self._claim.close()

    def in_peace(self, expected: str) -> None:
        """Let the training end."""
        (self.nodes.home / "signs" / "go").touch()
        until(lambda: not self.running, "the end of all nodes", PATIENCE)
        statuses = {number: node.process.returncode for number, node in enumerate(self.nodes.started)}
        unhurt = {number: status for number, status in statuses.items() if number not in self.hurt}
        assert not any(unhurt.values()), f"nodes that nothing was done to ended with {unhurt}"
        assert 0 in statuses.values(), f"all nodes ended with {statuses}"
        assert self.nodes.sign("weights-0") == expected, "the weights are not those of an undisturbed training"

    @property
    def running(self) -> list[Node]:
        """The nodes whose command has not ended."""
        return [node for node in self.nodes.started if not node.has_ended]

    # --- what is done to it

    def disturb(self) -> None:
        """Do one thing that the job must survive."""
        acts: list[Callable[[], str]] = [self.kill_worker, self.stop_worker, self.pause_everything]
        if len(self.running) < MOST + self.spares and 0 not in self.hurt:  # others come where node 0 was typed
            acts += [self.join, self.join]
        if len(self.running) > 1:
            acts += [self.kill_agent, self.kill_agent, self.leave, self.pause_agent]
        self.done.append(self.dice.choice(acts)())

    def victim(self, *, settled: bool) -> Node | None:
        """Return a node to which something may be done, so that others go on; None if there is none.

        `settled`: once all nodes train together. Else one dies while the job does without another, but as many are left as
        have died since, but for the first.
        """
        if settled or not self.members or len(self.members) < 1 + self.missed:
            until(self.settles, "a generation of all nodes", PATIENCE)
        number = self.dice.choice([at for at, node in enumerate(self.nodes.started) if not node.has_ended])
        if len(self.members - {number}) <= self.spares:  # one of them may be a spare, which decides nothing
            return None
        self.members.discard(number)
        self.missed += 1
        self.hurt.add(number)
        return self.nodes.started[number]

    def settles(self) -> bool:
        """Whether all running nodes but spares train in the newest generation; note which they are."""
        signs = self.nodes.home / "signs"
        begun = [int(path.name.split("-")[1]) for path in signs.glob("from-*-*")]
        world = signs / f"world-{max(begun, default=-1)}"
        running = {number: node for number, node in enumerate(self.nodes.started) if not node.has_ended}
        workers = [self.workers[number] for number in running]
        waiting = workers if len(running) > MOST else [0]
        if not world.exists() or int(world.read_text()) not in {sum(workers) - spare for spare in waiting}:
            return False
        self.members, self.missed = set(running) - self.hurt, 0
        return True

    def join(self) -> str:
        """Start one more node."""
        limits = ("--spares", self.spares, "--max-restarts", 1000, "--heartbeat-timeout", f"{SILENCE}s")
        self.workers.append(self.dice.randint(1, 2))
        quick = ("--rdzv-conf", "last_call_timeout=2", "--grace-period", "5s", "--nproc-per-node", self.workers[-1])
        method = ("--start-method", self.dice.choice(("forkserver", "forkserver", "forkserver", "spawn")))
        self.nodes.node(*self.nodes.c10d(f"1:{MOST}"), *limits, *quick, *method, *PROGRAM, env=QUICK)
        if len(self.nodes.started) == 1:
            self.nodes.answers()  # the others find node 0, and none of them becomes it
        return "a node joins"

    def kill_worker(self) -> str:
        """SIGKILL a worker of any node."""
        return self.signal_worker(signal.SIGKILL, "a worker is killed")

    def stop_worker(self) -> str:
        """SIGSTOP a worker for a moment: the others wait for it."""
        return self.signal_worker(signal.SIGSTOP, "a worker stands for a moment")

    def signal_worker(self, signum: int, what: str) -> str:
        workers = [pid for pid in self.nodes.left() if str(PROGRAM[0]).encode() in _command(pid) and _is_worker(pid)]
        if not workers:
            return f"{what}: there is none"
        pid = self.dice.choice(workers)
        _signal(pid, signum)
        if signum == signal.SIGSTOP:
            time.sleep(1.0)
            _signal(pid, signal.SIGCONT)
        return what

    def kill_agent(self) -> str:
        """SIGKILL an agent, with whose workers the kernel then does away."""
        if (node := self.victim(settled=self.dice.random() < 0.5)) is None:
            return "no agent is killed"
        _signal(node.agent, signal.SIGKILL)
        return f"agent {self.nodes.started.index(node)} is killed"

    def leave(self) -> str:
        """SIGTERM a node, which leaves."""
        if (node := self.victim(settled=True)) is None:
            return "no node leaves"
        _signal(node.process.pid, signal.SIGTERM)
        return f"node {self.nodes.started.index(node)} leaves"

    def pause_agent(self) -> str:
        """SIGSTOP an agent for so long that it may be lost to the others."""
        seconds = self.dice.choice((0.5, 2.0, SILENCE + 2.0))
        if (node := self.victim(settled=True)) is None:
            return "no agent stands"
        agent, self.missed = node.agent, MOST  # it may be alive
        _signal(agent, signal.SIGSTOP)
        time.sleep(seconds)
        _signal(agent, signal.SIGCONT)
        return f"agent {self.nodes.started.index(node)} stands for {seconds:g} s"

    def pause_everything(self) -> str:
        """SIGSTOP all processes of the job, as a closed laptop does."""
        pids = self.nodes.left()
        for signum in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                _signal(pid, signum)
            # of two nodes, one that has just been paused cannot know what the other one did meanwhile, should that be lost now
            time.sleep(SILENCE + 2.0)
        return "all stand for a while"


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _is_worker(pid: int) -> bool:
    try:
        return b"LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes() or b"bootstrap.py" in _command(pid)
    except OSError:
        return False


def _signal(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass


def undisturbed(home: Path) -> str:
    """Return what the training finds in one process that nothing disturbs."""
    job = Job(home)
    job.start(*PROGRAM, env=QUICK)
    (home / "signs" / "go").touch()
    assert job.wait(PATIENCE).status == 0
    return job.sign("weights-0")


def main() -> int:
    """Run rounds until the time is up, or one of a seed; return 1 at the first that fails, whose seed is printed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int)
    asked = parser.parse_args()
    top = Path(tempfile.mkdtemp(prefix="soak-"))
    (top / "undisturbed").mkdir()
    expected = undisturbed(top / "undisturbed")
    until_time = time.monotonic() + asked.minutes * 60
    seed = asked.seed if asked.seed is not None else time.time_ns() % 1_000_000_000
    rounds = 0
    while rounds == 0 or (asked.seed is None and time.monotonic() < until_time):
        home = top / f"{seed}"
        home.mkdir()
        one = Round(home, seed)
        began = time.monotonic()
        try:
            one.run(expected)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - whatever it was, the seed is printed
            print(f"seed {seed}: {'; '.join(one.done)}\nFAILED: {error}", flush=True)
            for number, node in enumerate(one.nodes.started):
                print(f"--- node {number} ended with {node.process.poll()}\n{node.err}")
            print(f"its files are in {home}\nagain: {sys.executable} -m tests.soak --seed {seed}")
            return 1
        print(f"seed {seed}: exact after {time.monotonic() - began:.0f} s: {'; '.join(one.done)}", flush=True)
        shutil.rmtree(home)
        seed, rounds = seed + 1, rounds + 1
    shutil.rmtree(top)
    print(f"{rounds} trainings ended with the exact result")
    return 0


if __name__ == "__main__":
    sys.exit(main())
