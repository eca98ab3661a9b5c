"""What is said of a signal that comes while all workers are being stopped already, and of a pause."""

from __future__ import annotations

from signal import SIGINT, SIGTERM

import pytest
from msgspec.structs import replace

from ddplaunch.launcher.decide.job import (
    SELF_ID,
    AgentLost,
    DeadlineReached,
    Event,
    FirstNodeUnheard,
    FirstNodeUnreached,
    NodeStopping,
    StopRequested,
    step,
)
from ddplaunch.launcher.tell.closing import headline
from ddplaunch.launcher.tell.job_reporter import Findings, JobReporter
from ddplaunch.launcher.tell.reporter import Reporter, Stderr
from ddplaunch.record.seen import Whereabouts
from ddplaunch.spec.outcome import Why
from ddplaunch.system.process.clock import Pause
from tests.unit.builders import spec
from tests.unit.supervise.job_histories import ELASTIC, THREE, end, ended, history, met, stopping
from tests.written import KeptLines

SIGNALS = {
    "to the command that started the agents": StopRequested(Why.SIGNALLED, SIGINT, 4.0),
    "to this node": NodeStopping(SELF_ID, Why.SIGNALLED, SIGINT, 4.0),
    "to another node": NodeStopping(1, Why.SIGNALLED, SIGINT, 4.0),
}


@pytest.mark.parametrize("policy", [ELASTIC, THREE], ids=["goes on without it", "ends with it"])
@pytest.mark.parametrize("event", SIGNALS.values(), ids=SIGNALS.keys())
def test_it_is_acknowledged_once_and_the_last_line_has_its_time(event, policy):
    clock, lines = [100.0], KeptLines()
    stderr = Stderr(writer=lines)
    told = JobReporter(Reporter(spec(grace_period=30.0), stderr, lambda: clock[0]))
    before, _ = history(policy, [*met(), AgentLost(2, "connection closed", 2.0)])

    def happens(event: Event, at: float) -> None:
        nonlocal before
        clock[0] = 100.0 + at
        state, _ = step(before, event)
        told.on_event(event, before, state)
        before = state

    happens(event, 4.0)
    happens(NodeStopping(1, Why.SIGNALLED, SIGINT, 4.5), 4.5)
    keys = "" if event == SIGNALS["to another node"] else "; Ctrl-C again kills"
    assert lines.said == [f"ddplaunch: stopping the workers on 2 nodes, up to 30 s{keys}\n"]
    for id, host in enumerate("ab"):
        killed = end(id, host, 110.0, code=None, signal=9, stopped_with=9, stopped_at=102.0)
        happens(ended(id, 10.0, killed), 10.0)
    told.report_end(Findings(state=before))
    if policy is ELASTIC:
        took = "2 workers ended in 8 s, ranks 0-1 by SIGKILL"
        assert lines.said[1:] == [f"ddplaunch: stopped by SIGINT (Ctrl-C) after 4 s; {took}\n"]
    else:
        assert lines.said[1].startswith("error: node 2 (c) was lost")


WHAT = "rank 1 has not reached all_reduce #4 of group 0, in which rank 0 waits"


@pytest.mark.parametrize(
    ("found", "notice", "added"),
    [
        (Whereabouts(explanation=WHAT, locations=("rank 0 waits",)), None, f"; {WHAT}"),
        (Whereabouts(), WHAT, f"; no worker made progress any more: {WHAT}"),
        (Whereabouts(), "", "; no worker made progress any more"),
        (Whereabouts(), None, ""),
    ],
    ids=["its stacks show it", "a notice has said it", "nobody knows why", "it did not hang"],
)
@pytest.mark.parametrize("signum", [SIGINT, SIGTERM])
def test_the_line_of_a_job_that_a_signal_ended_says_who_hung(found, notice, added, signum):
    lines = KeptLines()
    stderr = Stderr(writer=lines)
    told = JobReporter(Reporter(spec(), stderr, lambda: 104.0))
    state, _ = history(THREE, [*met(), NodeStopping(1, Why.SIGNALLED, signum, 4.0)])
    if notice is not None:
        told.report_idle(60.0, notice)
        state = replace(state, idleness=replace(state.idleness, printed_at=3.0, progress_at=1.0))
    told.report_end(Findings(state=state, found=found))
    shows_stacks = signum == SIGINT and bool(found.explanation)
    added = "" if found.explanation and not shows_stacks else added
    assert headline(lines.said[-1]).endswith(f"started{added}")
    assert WHAT not in headline(lines.said[-1]).removesuffix(added)
    assert tuple(told.story.locations) == (found.locations if shows_stacks else ())


@pytest.mark.parametrize(
    ("nodes", "runs"),
    [
        ({}, ""),
        ({"nnodes": (3, 3)}, ""),
        ({"nnodes": (2, 3)}, ", except --heartbeat-timeout: nodes may have been lost"),
        ({"nnodes": (2, 2), "spares": 1}, ", except --heartbeat-timeout: nodes may have been lost"),
        ({"nnodes": (2, 3), "simulate": "divide"}, ""),
    ],
    ids=str,
)
def test_after_a_pause_a_line_says_which_limits_of_time_ran_meanwhile(nodes, runs):
    lines = KeptLines()
    stderr = Stderr(writer=lines)
    Reporter(spec(**nodes), stderr, lambda: 0.0).report_pause(Pause(60.0, 0.0))
    assert lines.said == [f"ddplaunch: paused for 1 min; no time limit ran meanwhile{runs}\n"]


@pytest.mark.parametrize(
    "events",
    [
        [FirstNodeUnreached(((2, "no answer"),), 2.0)],
        [FirstNodeUnheard(2, "silent for 10 s", 2.0), DeadlineReached(4.0), *(stopping(id, 5.0) for id in (0, 1, 2))],
    ],
    ids=["before the generation", "in it"],
)
def test_a_node_that_is_let_go_has_left(events):
    told = JobReporter(reporter := Reporter(spec(), Stderr(writer=KeptLines()), lambda: 0.0))
    found = []
    reporter.add_reader(found.append)
    before, _ = history(ELASTIC, met())
    for event in events:
        after, _ = step(before, event)
        told.on_event(event, before, after)
        before = after
    left = [row.fields for row in found if row.name == "node_left"]
    assert left == [{"host": "c", "node_rank": 2, "reason": "it and other nodes do not hear each other"}]
