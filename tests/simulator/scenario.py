"""What a seed stands for: the job, its programs, and the faults that it meets. Values; they decide nothing."""

from __future__ import annotations

from random import Random
from signal import SIGHUP, SIGINT, SIGTERM
from typing import Any

from msgspec import Struct

from ddplaunch.launcher.decide import job

COMMAND = -1  # the machine on which the command was typed that has started all agents
LATE = 50  # the first number of machines that join late, or in place of others
FOREVER = 10_000.0  # seconds
_OF_MACHINES = ("kill", "kill", "kill", "crash", "crash", "stop", "freeze", "sleep")
_OF_LINKS = ("cut", "cut", "to arbiter", "from arbiter", "reset", "slow", "partition")
_KINDS = (*_OF_MACHINES, *_OF_LINKS, "join", "join", "replace", "between", "port")
_OF_PROGRAMS = ("sigterm", "sigterm", "signal", "front", "start", "withdraw", "fail", "fail", "killed")


class Fault(Struct, frozen=True, repr_omit_defaults=True):
    """Something that happens to a machine, its links or its workers."""

    at: float  # seconds
    kind: str
    machine: int = 0
    other: int = 0  # at the other end of the link, of "between"
    group: tuple[int, ...] = ()  # of "partition": those that are cut off from the rest
    lasts: float = 0.0  # seconds
    after: int = 0  # of "kill": actions that are carried out yet
    signum: int = 0


class Scenario(Struct, frozen=True, kw_only=True):
    """A job and what happens to it."""

    seed: int
    where: (
        str  # the arbiter is: "command", or in the agent of node 0, which somebody may start again "by hand", or "once"
    )
    policy: job.Policy
    heartbeat_timeout: float
    grace_period: float
    workers: int  # of each node
    ranked: bool  # agents have node ranks from their users
    program: str  # what workers do at SIGTERM: "ends", "slow", "ignores", or "daemons", which leaves a process behind
    slow: tuple[int, ...] = ()  # machines whose workers then need all of the grace period
    work: float  # steps of a second each, after which a worker exits with 0
    follows: float  # how likely a worker fails because another one has ended
    delay: float  # seconds that a message takes at most
    stuck: int = -2  # the machine whose workers not even SIGKILL ends
    faults: tuple[Fault, ...]

    @property
    def quiet_from(self) -> float:
        """When the last fault is over."""
        return max((fault.at + min(fault.lasts, 100.0) for fault in self.faults), default=0.0)


def policy_of(where: str, least: int, most: int, heartbeat_timeout: float, **fields: Any) -> job.Policy:
    """Return the policy of a job whose arbiter is there."""
    return job.Policy(
        min_nodes=least,
        max_nodes=most,
        lease=heartbeat_timeout + job.KILLED_WITHIN if least < most else 0.0,
        nodes_are_replaceable=where == "by hand",
        nodes_may_leave=where == "by hand",
        has_one_command=where == "command",
        **fields,
    )


def scenario(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    dice = Random(seed)
    where = dice.choice(("command", "command", "by hand", "by hand", "by hand", "once"))
    least = dice.choice((1, 1, 2, 2, 3))
    more, spares = dice.choice(((0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (1, 1), (0, 1), (1, 2), (0, 3)))
    is_large = dice.random() < 0.02
    if is_large:
        least, more, spares = dice.choice((1, 17, 30)), 10, dice.choice((0, 4))
    delay = dice.choice((0.01, 0.3, 0.9))
    heartbeat_timeout = dice.choice((10.0, 10.0, 3.0)) if delay < 0.9 else 10.0
    policy = policy_of(
        where,
        least,
        least + more + spares,
        heartbeat_timeout,
        spares=spares,
        max_restarts=dice.choice((0, 1, 3)),
        rdzv_timeout=dice.choice((15.0, 40.0)),
        last_call=dice.choice((0.0, 2.0, 5.0)),
        timeout=dice.choice((None, None, None, 60.0)),
    )
    starts = max(1, policy.max_nodes + dice.choice((-1, 0, 0, 0, 1)))
    faults = [Fault(0.0 if number == 0 else dice.uniform(0.0, 3.0), "join", number) for number in range(starts)]
    kinds = [*_KINDS, *(_OF_PROGRAMS if dice.random() < 0.4 else ()), *(["stop job"] if where == "command" else ())]
    begun, at = 0, 0.0
    for _ in range(dice.choice((0, 1, 2, 3, 4, 6))):
        kind = dice.choice(kinds)
        at = dice.choice((dice.uniform(0.0, 6.0), dice.uniform(0.0, 60.0), at + dice.uniform(0.0, 15.0)))
        machine = dice.choice((0, dice.randrange(starts), dice.randrange(starts)))
        lasts = dice.choice((0.5, 4.0, 9.5, 12.0, 30.0)) * dice.uniform(0.5, 1.2)
        if kind in ("kill", "stop") and where == "command" and dice.random() < 0.1:
            machine = COMMAND
        fault = Fault(at, kind, machine, lasts=lasts)
        match kind:
            case "join" | "replace":
                begun += 1
                new = Fault(at, "join", LATE + begun)
                if kind == "replace":  # not before the lease of its predecessor is over: see docs/design/simulator.md
                    faults.append(Fault(at, dice.choice(("kill", "crash", "cut")), machine, lasts=FOREVER))
                    new = Fault(at + policy.lease + dice.uniform(0.0, 10.0), "join", LATE + begun)
                faults.append(new)
                continue
            case "partition":
                group = tuple(sorted(dice.sample(range(starts), dice.randint(1, max(1, starts - 1)))))
                fault = Fault(at, kind, machine, group=group, lasts=lasts)
            case "between":
                fault = Fault(at, kind, machine, other=dice.randrange(starts), lasts=lasts)
            case "kill":
                fault = Fault(at, kind, machine, after=dice.choice((0, 0, 1, 2, 3, 5, 9, 20)))
            case "sigterm":
                fault = Fault(at, kind, machine, signum=int(dice.choice((SIGTERM, SIGTERM, SIGHUP))))
            case "signal" | "stop job":
                fault = Fault(at, kind, machine, signum=int(SIGINT))
        faults.append(fault)
        may_return = kind in ("kill", "crash", "sigterm", "front") and machine != COMMAND
        if may_return and where == "by hand" and dice.random() < (0.8 if machine == 0 else 0.4):
            since = at + (lasts if kind == "crash" else 0.0)
            faults += [Fault(since + dice.choice((0.5, 3.0, 10.0, 25.0)) * dice.uniform(0.5, 1.2), "return", machine)]
    if where == "by hand" and starts > 2 and dice.random() < 0.3:
        faults += _return(dice, starts)
    if sum(fault.kind == "join" for fault in faults) > policy.max_nodes:
        # an arbiter that has just begun cannot tell new nodes that fill the job from the first ones: see the same page
        faults = [fault for fault in faults if (fault.kind, fault.machine) != ("return", 0)]
    return Scenario(
        seed=seed,
        where=where,
        policy=policy,
        heartbeat_timeout=heartbeat_timeout,
        grace_period=dice.choice((1.0, 4.0, 12.0, 30.0)),
        workers=1 if is_large else dice.choice((1, 2)),
        ranked=dice.random() < 0.5,
        program=dice.choice(("ends", "ends", "slow", "ignores", "daemons")),
        work=dice.choice((6.0, 15.0, 40.0, *((FOREVER,) if policy.timeout else ()))),
        follows=dice.choice((0.0, 0.5, 1.0)),
        delay=delay,
        slow=tuple(number for number in range(starts) if dice.random() < 0.4) if dice.random() < 0.2 else (),
        stuck=dice.randrange(starts) if dice.random() < 0.03 else -2,
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
    )


def _return(dice: Random, starts: int) -> list[Fault]:
    """Return how node 0 ends and is back soon, while other nodes that followed it do not reach it."""
    at = dice.uniform(4.0, 25.0)
    apart = dice.sample(range(1, starts), dice.randint(1, starts - 2))
    cuts = [
        Fault(at - dice.random(), dice.choice(("cut", "freeze", "sleep", "to arbiter")), one, lasts=40.0)
        for one in apart
    ]
    return [
        *cuts,
        Fault(at, dice.choice(("kill", "sigterm")), signum=int(SIGTERM)),
        Fault(at + dice.uniform(0.5, 6.0), "return"),
    ]
