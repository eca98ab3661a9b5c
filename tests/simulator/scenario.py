"""What a seed stands for: the job, its programs, and the faults that it meets. Values; they decide nothing."""

from __future__ import annotations

from random import Random
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.launcher.decide import job

MOST_NODES = 7  # agents that a scenario begins with; later ones have higher numbers
_KINDS = (
    *("kill", "kill", "kill", "crash", "reset", "cut", "sever", "deaf", "pause", "partition", "slow", "join", "join"),
    *("sigterm", "sigterm", "signal", "twice", "twice", "front", "start", "port", "withdraw"),
    *("fail", "fail", "killed", "raise"),
)


COORDINATOR = -1  # whichever agent has it then


class Fault(Struct, frozen=True, repr_omit_defaults=True):
    """Something that happens to one agent, its links or its workers."""

    at: float  # seconds
    kind: str
    agent: int = 0
    other: int = 0  # at the other end of the link, of "reset", "sever", "slow", and "deaf"
    group: tuple[int, ...] = ()  # of "partition": those that are cut off from the rest
    awaits: bool = False  # it waits until a coordinator next takes over, or announces a generation
    lasts: float = 0.0  # seconds
    after: int = 0  # of "kill": actions that the agent carries out yet
    signum: int = 0


class Scenario(Struct, frozen=True, kw_only=True):
    """A job and what happens to it."""

    seed: int
    policy: job.Policy
    heartbeat_timeout: float
    grace_period: float
    stacks_within: float
    health_check: bool
    workers: int  # of each node
    ranked: bool  # agents have node ranks from their users
    program: str  # what workers do at SIGTERM: "ends", "slow", "ignores", or "daemons", which leaves a process behind
    slow: tuple[int, ...] = ()  # agents whose workers then need most of the grace period
    work: float  # seconds until a worker that nobody disturbs exits with 0
    follows: float  # how likely a worker fails because another one has ended
    delay: float  # seconds that a message takes at most
    stuck: int = -1  # the agent whose workers not even SIGKILL ends
    faults: tuple[Fault, ...]

    @property
    def quiet_from(self) -> float:
        """When the last fault is over."""
        return max((fault.at + fault.lasts for fault in self.faults), default=0.0)


def scenario(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    dice = Random(seed)
    least = dice.choice((1, 2, 2, 3))
    more, spares = dice.choice(((0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (1, 1), (0, 1), (1, 2), (0, 3)))
    has_notice, is_dispatched = dice.random() < 0.2, dice.random() < 0.2
    policy = job.Policy(
        min_nodes=least,
        max_nodes=least + more + spares,
        has_successors=more + spares > 0,
        spares=spares,
        max_restarts=dice.choice((0, 1, 3)),
        rdzv_timeout=dice.choice((15.0, 40.0)),
        last_call=dice.choice((0.0, 2.0, 5.0)),
        timeout=dice.choice((None, None, 40.0)),
        hang_timeout=dice.choice((None, None, 6.0)),
        replaceable=dice.random() < 0.5,
        may_leave=not is_dispatched and dice.random() < 0.8,
        dispatched=is_dispatched,
        notices=frozenset({int(SIGUSR1)}) if has_notice else frozenset(),
    )
    if dice.random() < 0.1:
        policy = replace(policy, max_no_progress=2)
    starts = min(max(1, policy.max_nodes + dice.choice((-1, 0, 0, 0, 1))), MOST_NODES)
    faults = [Fault(0.0 if number == 0 else dice.uniform(0.0, 3.0), "join", number) for number in range(starts)]
    kinds = [*_KINDS, *(["notice"] * 3 if has_notice else []), *(["stop"] if policy.dispatched else [])]
    if policy.timeout or policy.hang_timeout:
        kinds += ["hang", "hang"]
    begun, at = 0, 0.0
    for _ in range(dice.choice((0, 1, 2, 3, 4, 6))):
        kind = dice.choice(kinds)
        at = dice.choice((dice.uniform(0.0, 6.0), dice.uniform(0.0, 60.0), at + dice.uniform(0.0, 15.0)))
        agent, other = dice.randrange(starts + begun), dice.choice((0, dice.randrange(starts)))
        if policy.has_successors and dice.random() < 0.3:
            agent = COORDINATOR
        elif agent == 0 and kind in ("kill", "crash", "pause") and dice.random() < 0.6:
            agent = dice.randrange(starts + begun)
        lasts = dice.choice((0.5, 4.0, 9.5, 12.0, 30.0)) * dice.uniform(0.5, 1.2)
        group: tuple[int, ...] = ()
        if kind == "join":
            agent, lasts, begun = MOST_NODES + begun, 0.0, begun + 1
        elif kind == "partition":
            group = tuple(sorted(dice.sample(range(starts), dice.randint(1, max(1, starts - 1)))))
        elif kind not in ("cut", "sever", "deaf", "pause", "slow", "port", "crash"):
            lasts = 0.0
        after = dice.choice((0, 0, 1, 2, 3, 5, 9, 20)) if kind == "kill" else 0
        signum = {"signal": SIGINT, "stop": SIGINT, "sigterm": SIGTERM, "notice": SIGUSR1}.get(kind, 0)
        if kind == "sigterm" and dice.random() < 0.2:
            signum = SIGHUP
        if kind == "twice":
            signum = dice.choice((SIGINT, SIGTERM))
        awaits = policy.has_successors and kind != "join" and dice.random() < 0.2
        faults.append(Fault(at, kind, agent, other, group, awaits, lasts, after, int(signum)))
    delay = dice.choice((0.01, 0.3, 2.0))
    found = Scenario(
        seed=seed,
        policy=policy,
        heartbeat_timeout=dice.choice((10.0, 10.0, 3.0)) if delay < 1.0 else 10.0,
        grace_period=dice.choice((1.0, 4.0, 12.0, 30.0)),
        stacks_within=dice.choice((0.0, 0.0, 3.0)),
        health_check=dice.random() < 0.15,
        workers=dice.choice((1, 2)),
        ranked=dice.random() < 0.3,
        program=dice.choice(("ends", "ends", "slow", "ignores", "daemons")),
        work=dice.choice((3.0, 12.0, 30.0)),
        follows=dice.choice((0.0, 0.5, 1.0)),
        delay=delay,
        slow=tuple(number for number in range(starts) if dice.random() < 0.4) if dice.random() < 0.2 else (),
        stuck=dice.randrange(starts) if dice.random() < 0.04 else -1,
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
    )
    if policy.has_successors and starts > 2 and dice.random() < 0.2:
        found = replace(found, faults=tuple(sorted((*found.faults, *_split(dice, starts)), key=lambda fault: fault.at)))
    if policy.has_successors and starts > 2 and dice.random() < 0.15:
        found = replace(found, faults=tuple(sorted((*found.faults, *_reset(dice, starts)), key=lambda fault: fault.at)))
    if policy.spares > 1 and starts > 3 and dice.random() < 0.5:
        early = Fault(0.0, "kill", COORDINATOR, awaits=True, after=dice.choice((2, 4, 6, 8, 12)))
        found = replace(found, faults=tuple(sorted((*found.faults, early), key=lambda fault: fault.at)))
    return found


def _reset(dice: Random, starts: int) -> tuple[Fault, ...]:
    """Return how node 0 loses some nodes by a reset, and ends when it goes on without them, while they reach it again."""
    at = dice.uniform(3.0, 30.0)
    group = dice.sample(range(1, starts), dice.randint(1, starts - 2))
    rest = [number for number in range(1, starts) if number not in group]
    later, lasts = at + dice.random(), dice.uniform(0.2, 2.5)
    return (
        *(Fault(at, "reset", 0, one) for one in group),
        *(Fault(later, "sever", one, other, lasts=60.0) for one in group for other in rest),
        *(Fault(later, "sever", 0, one, lasts=lasts) for one in group),
        Fault(at, "kill", COORDINATOR, awaits=True, after=dice.choice((2, 4, 6, 8, 12))),
    )


def _split(dice: Random, starts: int) -> tuple[Fault, ...]:
    """Return how node 0 ends while the others lose each other, so that two may take over."""
    at, lasts = dice.uniform(3.0, 30.0), dice.uniform(15.0, 40.0)
    group = dice.sample(range(1, starts), dice.randint(1, starts - 2))
    rest = [number for number in range(1, starts) if number not in group]
    cuts = [Fault(at, "sever", one, other, lasts=lasts) for one in group for other in rest]
    return (*cuts, Fault(at + dice.uniform(-1.0, 2.0), dice.choice(("kill", "sigterm")), signum=int(SIGTERM)))
