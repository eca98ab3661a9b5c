from signal import SIGINT, SIGTERM, SIGUSR1

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import asdict, replace

from ddplaunch.launcher.decide import job
from ddplaunch.launcher.decide.job import *
from ddplaunch.spec.outcome import StartFailure, Why
from tests.unit.supervise.job_histories import (
    ELASTIC,
    THREE,
    TOO_FEW,
    end,
    ended,
    failing,
    history,
    member,
    met,
    silent,
    stopped,
    stopping,
)
from tests.unit.supervise.phases import job_step

FOLLOWING = "RuntimeError: [../third_party/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]:1234"

FREE = "give each node a rank of its own: `--node-rank {}` is free"
FULL = "for more nodes type a greater `--nnodes` on each; for another job, another port on each of its nodes"
HAS_ENDED = "; or, if the agent with that rank has just ended, try again once the job has noticed"

WITHDRAWN = Withdrawn("node 2 (c)", 2, "it has no disk", "buy one", 3)

HISTORIES: dict[str, tuple[Policy, list[Event], list[Action]]] = {
    "nothing starts before all are there": (THREE, met(2), []),
    "all start together in order of arrival": (THREE, met(), [BeginGeneration(0, (0, 1, 2), 0)]),
    "a node that was given a rank gets it whenever it arrives": (THREE,
        [Joined(member(0, 0), 0), Joined(member(1, 2), 1), Joined(member(2, 1), 2)],
        [BeginGeneration(0, (0, 2, 1), 0)]),
    "given ranks and free ones fit together": (THREE,
        [Joined(member(0), 0), Joined(member(1), 1), Joined(member(2, 1), 2)], [BeginGeneration(0, (0, 2, 1), 0)]),
    "a rank that is taken is refused, and the others go on waiting": (THREE,
        [Joined(member(0, 0), 0), Joined(member(1, 1), 1), Joined(member(2, 1), 2), Joined(member(3, 2), 3)],
        [Refuse(2, "node rank 1 is taken by b", 2, FREE.format(2)), BeginGeneration(0, (0, 1, 3), 0)]),
    "an agent that is started again before its end was noticed waits for that": (THREE,
        [Joined(member(0, 0), 0), Joined(member(1, 1), 1), Joined(replace(member(2, 1), host="b"), 2)],
        [Refuse(2, "node rank 1 is taken by b", 2, FREE.format(2) + HAS_ENDED)]),
    "rank 0 is the coordinator's, with or without asking for it": (THREE,
        [Joined(member(0), 0), Joined(member(1, 0), 1)], [Refuse(1, "node rank 0 is taken by a", 2, FREE.format(1))]),
    "a rank beyond the job is refused": (THREE, [Joined(member(0, 0), 0), Joined(member(1, 3), 1)],
        [Refuse(1, "node rank 3: the job has 3 nodes, node ranks 0 to 2", 2, FREE.format(1))]),
    "one node too many is refused": (THREE, [*met(), Joined(member(3), 1)],
        [BeginGeneration(0, (0, 1, 2), 0), Refuse(3, "the job has its 3 nodes already: a, b, c", 2, FULL)]),
    "when all have finished the job has": (THREE, [*met(), ended(1, 5), ended(0, 6), ended(2, 7)],
        [BeginGeneration(0, (0, 1, 2), 0), EndJob(0)]),
    "a failure on one node stops the others and gives the status": (THREE,
        [*met(), *failing(1, 5.0), stopping(0, 5.2), stopping(2, 5.3)],
        [BeginGeneration(0, (0, 1, 2), 0), StopNodes((0, 2), SIGTERM), EndJob(7)]),
    "of two failures the one that was first on one clock counts, whoever tells first": (THREE,
        [*met(), NodeStopping(1, Why.FAILED, SIGTERM, 5.2), NodeStopping(2, Why.FAILED, SIGTERM, 5.3),
        ended(1, 5.4, end(1, "b", 5.1, 7)), ended(2, 5.5, end(2, "c", 5.0, 9)), stopping(0, 5.6)],
        [BeginGeneration(0, (0, 1, 2), 0), StopNodes((0, 2), SIGTERM), EndJob(9)]),
    "a worker that could not be started ends the job, whatever restarts are left": (
        Policy(min_nodes=3, max_nodes=3, max_restarts=5),
        [*met(), NodeStopping(2, Why.FAILED, SIGTERM, 1),
        ended(2, 1.1, failed=StartFailure(4, "c", "x: No such file or directory", 127)), stopping(0, 1.2),
        stopping(1, 1.3)], [BeginGeneration(0, (0, 1, 2), 0), StopNodes((0, 1), SIGTERM), EndJob(127)]),
    "Ctrl-C on one node reaches all as what it is": (
        THREE,
        [*met(), NodeStopping(2, Why.SIGNALLED, SIGINT, 5), stopping(0, 6), stopping(1, 6), stopping(2, 6)],
        [
            BeginGeneration(0, (0, 1, 2), 0),
            StopNodes((0, 1), SIGINT),
            StopNodes((1, 2), SIGINT, another_node_ended=True),  # to each once
            EndJob(130),
        ],
    ),
    "a second Ctrl-C on any node kills everywhere": (THREE,
        [*met(), NodeStopping(2, Why.SIGNALLED, SIGINT, 5), stopping(1, 6), NodeEscalated(2, SIGINT, 7)],
        [BeginGeneration(0, (0, 1, 2), 0), StopNodes((0, 1), SIGINT), StopNodes((0, 2), SIGINT, another_node_ended=True),
        KillNodes((0,))]),
    "--timeout on node 0 is the job's": (THREE,
        [*met(), NodeStopping(0, Why.TIMED_OUT, SIGTERM, 9), stopping(0, 9), stopping(1, 9), stopping(2, 9)],
        [BeginGeneration(0, (0, 1, 2), 0), StopNodes((1, 2), SIGTERM), EndJob(124)]),
    "a lost node ends the job with its own status": (THREE,
        [*met(), AgentLost(2, "silent for 10 s", 20), stopping(0, 21), stopping(1, 21)],
        [BeginGeneration(0, (0, 1, 2), 0), StopNodes((0, 1), SIGTERM), EndJob(122)]),
    "a node whose front was killed is lost": (THREE,
        [*met(), NodeStopping(2, Why.FRONT_LOST, SIGTERM, 5), stopping(0, 6), stopping(1, 6)],
        [BeginGeneration(0, (0, 1, 2), 0), StopNodes((0, 1), SIGTERM), Drop(2), EndJob(122)]),
    "when the coordinator's own front is killed the job ends": (THREE,
        [*met(), NodeStopping(0, Why.FRONT_LOST, SIGTERM, 5), stopping(0, 6), stopping(1, 6), stopping(2, 6)],
        [BeginGeneration(0, (0, 1, 2), 0), StopNodes((1, 2), SIGTERM), EndJob(122)]),
    "a job whose time was up has not finished if a node is lost, though all workers of the others had": (
        Policy(min_nodes=3, max_nodes=3, timeout=20),
        [*met(), DeadlineReached(20), ended(0, 20.1), AgentLost(2, "connection closed", 20.2), ended(1, 20.3)],
        [BeginGeneration(0, (0, 1, 2), 0), StopNodes((0, 1, 2), SIGTERM), EndJob(124)]),
    "a failure that was there before the node was lost gives the status": (THREE,
        [*met(), *failing(1, 5.0), AgentLost(2, "connection closed", 5.3), stopping(0, 6)],
        [BeginGeneration(0, (0, 1, 2), 0), StopNodes((0, 2), SIGTERM), EndJob(7)]),
    "a failure that only follows does not hide that a node was lost": (THREE,
        [*met(), NodeStopping(1, Why.FAILED, SIGTERM, 5), AgentLost(2, "silent for 10 s", 6),
        ended(1, 7, end(1, "b", 5, 1, stderr_tail=FOLLOWING)), stopping(0, 7)],
        [BeginGeneration(0, (0, 1, 2), 0), StopNodes((0, 2), SIGTERM), EndJob(122)]),
    "a node that goes after it has finished is not lost": (THREE,
        [*met(), ended(2, 5), AgentLost(2, "connection closed", 6), ended(0, 7), ended(1, 7)],
        [BeginGeneration(0, (0, 1, 2), 0), EndJob(0)]),
    "a restart begins when all have ended, with the same places": (Policy(min_nodes=3, max_nodes=3, max_restarts=1),
        [*met(), *failing(1, 50.0), stopping(0, 51), stopping(2, 52), DeadlineReached(52)],
        [BeginGeneration(0, (0, 1, 2), 0), StopNodes((0, 2), SIGTERM), ReportFailure(0.0),
        BeginGeneration(1, (0, 1, 2), 1)]),
    "restarts are used up": (Policy(min_nodes=1, max_nodes=1, max_restarts=1),
        [*met(1), *failing(0, 50.0), DeadlineReached(51), *failing(0, 100.0)],
        [BeginGeneration(0, (0,), 0), ReportFailure(0.0), BeginGeneration(1, (0,), 1), EndJob(7)]),
    "who does not want to wait for a stop wants no restart": (Policy(min_nodes=2, max_nodes=2, max_restarts=1),
        [*met(2), NodeStopping(1, Why.FAILED, SIGTERM, 5), NodeEscalated(0, SIGINT, 6), stopping(0, 6),
        *failing(1, 5)[1:]], [BeginGeneration(0, (0, 1), 0), StopNodes((0,), SIGTERM), KillNodes((1,)), EndJob(7)]),
    "Ctrl-C between two generations ends the job": (Policy(min_nodes=2, max_nodes=2, max_restarts=3),
        [*met(2), *failing(1, 5), stopping(0, 6), NodeStopping(1, Why.SIGNALLED, SIGINT, 6)],
        [BeginGeneration(0, (0, 1), 0), StopNodes((0,), SIGTERM), ReportFailure(0.0), EndJob(130)]),
    "who leaves before the start may come again": (replace(THREE, nodes_are_replaceable=True),
        [*met(2), NodeStopping(1, Why.SIGNALLED, SIGINT, 3), Joined(member(3), 4), Joined(member(4), 5)],
        [Release(1, SIGINT), BeginGeneration(0, (0, 3, 4), 0)]),
    "a node that is gone before the start is waited for if it can come again": (replace(THREE, nodes_are_replaceable=True),
        [*met(2), AgentLost(1, "connection closed", 3), Joined(member(3), 4), Joined(member(4), 5)],
        [BeginGeneration(0, (0, 3, 4), 0)]),
    "and if others can come": (ELASTIC,
        [*met(2), AgentLost(1, "connection closed", 3), Joined(member(3), 4), Joined(member(4), 5)],
        [BeginGeneration(0, (0, 3, 4), 0)]),
    "else the job ends at once": (THREE, [*met(2), AgentLost(1, "connection closed", 3)], [EndJob(122)]),
    "in the pause before a restart too": (replace(THREE, max_restarts=1),
        [*met(), *failing(0, 1), stopping(1, 2), stopping(2, 2), AgentLost(2, "connection closed", 3)],
        [BeginGeneration(0, (0, 1, 2), 0), StopNodes((1, 2), SIGTERM), ReportFailure(0.0), EndJob(122)]),
    "a signal to a node that has not started yet is one to the job if no other can come": (THREE,
        [*met(2), NodeStopping(1, Why.SIGNALLED, SIGINT, 3)], [EndJob(130)]),
    "Ctrl-C at the coordinator before the start ends all": (THREE, [*met(2), NodeStopping(0, Why.SIGNALLED, SIGINT, 3)],
        [EndJob(130)]),
    "a job that waits for a node which cannot take part ends, and says why": (THREE, [*met(2), WITHDRAWN],
        [EndJob(121, "node 2 (c) does not take part: it has no disk", 0, "buy one")]),
    "a job that can do without that node, or has begun, goes on": (ELASTIC,
        [*met(2), WITHDRAWN, NodeGivenUp(2, 1), WITHDRAWN], [BeginGeneration(0, (0, 1), 0)]),
    "nobody waits for a last call once all others are known not to come": (ELASTIC, [*met(2), NodeGivenUp(2, 1)],
        [BeginGeneration(0, (0, 1), 0)]),
    "one that comes after another was given up is the last": (Policy(min_nodes=2, max_nodes=4),
        [*met(2), NodeGivenUp(2, 1), Joined(member(2), 2)], [BeginGeneration(0, (0, 1, 2), 0)]),
    "the last call is no longer because one was given up": (Policy(min_nodes=2, max_nodes=4),
        [*met(2), NodeGivenUp(2, 20), DeadlineReached(30.1)], [BeginGeneration(0, (0, 1), 0)]),
    "too few are waited for, whoever was given up": (ELASTIC, [*met(1), NodeGivenUp(1, 1), NodeGivenUp(2, 2)], []),
    "who was given up before the start changes nothing after it": (ELASTIC,
        [*met(3), NodeGivenUp(2, 1), AgentLost(2, "gone", 5), stopping(0, 6), stopping(1, 6), DeadlineReached(7)],
        [BeginGeneration(0, (0, 1, 2), 0), StopNodes((0, 1), SIGTERM), ReportFailure(0.0),
        BeginGeneration(1, (0, 1), 0)]),
    "an elastic job starts with the least number after the last call": (ELASTIC,
        [*met(2), DeadlineReached(29.0), DeadlineReached(30.1)], [BeginGeneration(0, (0, 1), 0)]),
    "a newcomer extends the last call": (Policy(min_nodes=2, max_nodes=4, last_call=30.0),
        [*met(2), Joined(member(2), 20), DeadlineReached(30.1), DeadlineReached(50)],
        [BeginGeneration(0, (0, 1, 2), 0)]),
    "a lost node leaves an elastic job to the others, with new ranks and no restart counted": (ELASTIC,
        [*met(), AgentLost(1, "silent for 10 s", 60), stopping(0, 61), stopping(2, 61), DeadlineReached(61)],
        [BeginGeneration(0, (0, 1, 2), 0), StopNodes((0, 2), SIGTERM), ReportFailure(0.0),
        BeginGeneration(1, (0, 2), 0)]),
    "a node that joins an elastic job makes a new generation": (ELASTIC,
        [*met(2), DeadlineReached(30.1), Joined(member(2), 60), stopping(0, 61), stopping(1, 61), DeadlineReached(61)],
        [BeginGeneration(0, (0, 1), 0), StopNodes((0, 1), SIGTERM), BeginGeneration(1, (0, 1, 2), 0)]),
    "a node that joins when others have finished already waits": (ELASTIC,
        [*met(2), DeadlineReached(30.1), ended(1, 60), Joined(member(2), 61), ended(0, 62)],
        [BeginGeneration(0, (0, 1), 0), EndJob(0)]),
    "an elastic job that has too few nodes left ends": (ELASTIC,
        [*met(2), DeadlineReached(30.1), AgentLost(1, "connection closed", 60), stopping(0, 61)],
        [BeginGeneration(0, (0, 1), 0), StopNodes((0,), SIGTERM), EndJob(122)]),
    "with restarts left a lost node may be replaced": (
        Policy(min_nodes=2, max_nodes=2, max_restarts=1, nodes_are_replaceable=True),
        [*met(2), AgentLost(1, "connection closed", 60), stopping(0, 61), DeadlineReached(61), Joined(member(2), 70)],
        [BeginGeneration(0, (0, 1), 0), StopNodes((0,), SIGTERM), ReportFailure(0.0), BeginGeneration(1, (0, 2), 1)]),
    "a replacement that does not come ends the job": (
        Policy(min_nodes=2, max_nodes=2, max_restarts=1, nodes_are_replaceable=True, rdzv_timeout=100),
        [*met(2), AgentLost(1, "connection closed", 60), stopping(0, 61), DeadlineReached(61), DeadlineReached(161)],
        [BeginGeneration(0, (0, 1), 0), StopNodes((0,), SIGTERM), ReportFailure(0.0),
        TOO_FEW]),
    "nodes that do not join in time are named": (Policy(min_nodes=3, max_nodes=3, host_names=("a", "b", "c")),
        [Joined(member(0, 0), 0), Joined(member(2, 2), 1), DeadlineReached(600)],
        [EndJob(121, "the rendezvous timed out: 2 of 3 nodes joined (a, c); missing: node 1 (b)")]),
    "whoever comes after the end is told so": (Policy(min_nodes=1, max_nodes=1),
        [*met(1), ended(0, 5), Joined(member(1), 6)],
        [BeginGeneration(0, (0,), 0), EndJob(0), Refuse(1, "the job has ended", 121)]),
    "what a member says that has been lost counts no more": (THREE,
        [*met(), AgentLost(2, "silent", 20), ended(2, 21), NodeStopping(2, Why.SIGNALLED, SIGINT, 21)],
        [BeginGeneration(0, (0, 1, 2), 0), StopNodes((0, 1), SIGTERM)]),
}  # fmt: skip


@pytest.mark.parametrize("sentence", HISTORIES)
def test_histories(sentence: str) -> None:
    policy, events, expected = HISTORIES[sentence]
    assert silent(history(policy, events)[1]) == expected


def test_whom_the_job_waits_for_is_said_after_a_while_and_again() -> None:
    policy = Policy(min_nodes=3, max_nodes=3, host_names=("a", "b", "c"))
    _, actions = history(policy, [Joined(member(0, 0), 0), DeadlineReached(3.0), DeadlineReached(4.0)])
    assert actions == [Print("1 of 3 nodes joined (a) after 3 s of 10 min; waiting for node 1 (b), node 2 (c)")]
    _, actions = history(policy, [Joined(member(0, 0), 0), DeadlineReached(3.0), DeadlineReached(33.0)])
    assert actions[1:] == [Print("1 of 3 nodes joined (a) after 33 s of 10 min; waiting for node 1 (b), node 2 (c)")]


@pytest.mark.parametrize(
    ("nodes", "command", "said"),
    [
        (2, "ddplaunch --node-rank= -- a.py", "on node 1 run: ddplaunch --node-rank=1 -- a.py"),
        (4, "ddplaunch --node-rank= -- a.py", "on node 1 run: ddplaunch --node-rank=1 -- a.py; likewise on node 2, 3"),
        (4, "ddplaunch -- a.py", "on 3 more nodes run: ddplaunch -- a.py"),
    ],
)
def test_what_to_type_on_a_missing_node_is_said_where_users_start_it(nodes: int, command: str, said: str) -> None:
    policy = Policy(min_nodes=nodes, max_nodes=nodes, command_elsewhere=tuple(command.split()))
    _, actions = history(policy, [Joined(member(0, 0), 0), DeadlineReached(3.0)])
    assert actions == [Print(f"1 of {nodes} nodes joined (a) after 3 s of 10 min; {said}")]


def test_different_versions_are_a_warning_when_they_meet() -> None:
    agreed = [(("torch", "2.13.0"),), (("torch", "2.12.1"),), (("torch", ""),)]
    _, actions = history(THREE, [Joined(member(id, agreed=agreed[id]), id) for id in range(3)])
    assert actions[0] == Print("warning: torch is not the same on all nodes: 2.13.0 on a, 2.12.1 on b")


def test_a_node_that_has_finished_while_others_run_on_is_named_once() -> None:
    _, actions = history(THREE, [*met(), ended(1, 5), DeadlineReached(65), DeadlineReached(130)])
    words = [action.text for action in actions if isinstance(action, Print)]
    assert words == [
        "node 1 (b) finished a minute ago while the others run on: a collective that waits for it never ends"
    ]


# --- whatever happens


def events() -> st.SearchStrategy[list[Event]]:
    ids = st.integers(0, 4)
    whys = st.sampled_from([Why.FAILED, Why.TIMED_OUT, Why.FRONT_LOST])
    signals = st.sampled_from([SIGINT, SIGTERM])
    one = st.one_of(
        st.builds(lambda id, wanted: Joined(member(id, wanted), 0), st.integers(1, 4), st.none() | st.integers(0, 3)),
        st.builds(lambda id: AgentLost(id, "gone", 0), st.integers(1, 4)),
        st.builds(lambda id, signum: NodeStopping(id, Why.SIGNALLED, signum, 0), ids, signals),
        st.builds(lambda id, why: NodeStopping(id, why, SIGTERM, 0), ids, whys),
        st.builds(lambda id, signum: NodeEscalated(id, signum, 0), ids, signals),
        st.builds(lambda id, code: ended(id, 0, end(id, "abcdef"[id], 0, code)), ids, st.sampled_from([0, 1])),
        st.just(DeadlineReached(0)),
        st.builds(lambda rank: NodeGivenUp(rank, 0), st.integers(0, 3)),
        st.just(WITHDRAWN),
    )
    return st.lists(one, max_size=30)


@given(
    happened=events(),
    restarts=st.integers(0, 2),
    min_nodes=st.integers(1, 3),
    more=st.integers(0, 2),
    others=st.booleans(),
)
def test_whatever_happens_the_job_can_always_end_and_nobody_is_forgotten(happened, restarts, min_nodes, more, others):
    policy = Policy(
        min_nodes=min_nodes,
        max_nodes=min_nodes + more,
        max_restarts=restarts,
        nodes_may_leave=others,
        nodes_are_replaceable=others,
    )
    state = job.first_state(policy, 0.0, 1)
    clock = 0.0
    state, _ = job_step(state, Joined(member(SELF_ID), clock))
    for event in happened:
        clock += 10.0
        fresh = isinstance(event, Joined) and event.member.id in state.members
        if fresh or (isinstance(event, NodeEnded) and not _runs(state, event.id)):
            continue
        state, actions = job_step(state, _at(event, clock))
        for action in actions:
            if isinstance(action, (StopNodes, KillNodes)):
                assert all(_runs(state, id) for id in action.ids)
            if isinstance(action, BeginGeneration):
                assert policy.min_nodes <= len(action.order) <= policy.max_nodes
                assert action.order[0] == SELF_ID
                assert [state.members[id].node_rank for id in action.order] == list(range(len(action.order)))
        if state.phase is Phase.ENDED:
            assert state.end.status is not None
            assert (state.end.status == 0) == (state.why is Why.FINISHED)
    for _ in range(20):  # everybody ends, time passes: so does the job
        for id in list(state.members):
            if _runs(state, id):
                clock += 1
                state, _ = job_step(state, ended(id, clock, end(id, "abcdef"[id], clock)))
        clock += 1000
        state, _ = job_step(state, DeadlineReached(clock))
    assert state.phase is Phase.ENDED


def _runs(state: State, id: int) -> bool:
    found = state.members.get(id)
    running = state.phase in (Phase.RUNNING, Phase.STOPPING)
    return found is not None and found.node_rank is not None and not found.has_ended and running


def _at(event: Event, at: float) -> Event:
    return replace(event, at=at)


def test_who_joined_late_and_leaves_before_its_turn_ends_nothing() -> None:
    """It came when some had finished already, so it waited for the end."""
    late = [*met(2), DeadlineReached(30.1), ended(1, 40), Joined(member(2), 41)]
    state, actions = history(ELASTIC, [*late, NodeStopping(2, Why.SIGNALLED, SIGINT, 42)])
    assert silent(actions) == [BeginGeneration(0, (0, 1), 0), Release(2, SIGINT)]
    assert state.phase is Phase.RUNNING


INTERRUPTED = [*met(), NodeStopping(1, Why.SIGNALLED, SIGINT, 0.3)]
NOTHING_STARTED = [NodeEnded(id, (), None, 0.4) for id in range(3)]
WERE_STARTED: dict[str, tuple[list[Event], bool]] = {
    "not while the nodes meet": ([*met(2), NodeStopping(0, Why.SIGNALLED, SIGINT, 3)], False),
    "not if each node was stopped before its first worker": ([*INTERRUPTED, *NOTHING_STARTED], False),
    "once a worker of any node has ended": ([*INTERRUPTED, *NOTHING_STARTED[:2], stopping(2, 0.4)], True),
    "perhaps, if a node was lost": ([*INTERRUPTED, *NOTHING_STARTED[:2], AgentLost(2, "silent", 9)], True),
    "if one of them cannot be ended": (
        [*INTERRUPTED, *NOTHING_STARTED[:2], NodeEnded(2, (), None, 9, ("pid 7 (python)",))],
        True,
    ),
}


@pytest.mark.parametrize("sentence", WERE_STARTED)
def test_workers_were_started(sentence: str) -> None:
    events, has_begun = WERE_STARTED[sentence]
    state, _ = history(THREE, events)
    assert (state.phase, state.workers_may_have_begun) == (Phase.ENDED, has_begun)


def test_no_generation_begins_beside_a_process_that_could_not_be_ended() -> None:
    left = NodeEnded(2, (end(2, "c", 1.0),), None, 7, ("pid 7 (python) in uninterruptible sleep",))
    state, actions = history(replace(THREE, max_restarts=3), [*met(), *failing(0, 1), stopping(1, 2), left])
    assert (state.phase, state.end.status, state.generation.leftovers) == (Phase.ENDED, 7, left.leftovers)
    assert silent(actions)[-1] == EndJob(7)


def test_a_generation_that_cannot_begin_ends_the_job() -> None:
    failed = BeginFailed(StartFailure(0, "a", "no port is free", 2), 4)
    again = [*met(), *failing(0, 1), stopping(1, 2), stopping(2, 2), DeadlineReached(3), failed]
    state, actions = history(replace(THREE, max_restarts=3), again)
    assert (state.phase, state.why, state.generation.start_failure) == (Phase.ENDED, Why.FAILED, failed.failure)
    assert silent(actions)[-1] == EndJob(2)


def test_each_generation_has_the_term_after_that_of_the_one_before_whatever_began_it() -> None:
    policy = replace(ELASTIC, max_restarts=1)
    failed: list[Event] = [*failing(1, 41.0), stopping(0, 41.2), DeadlineReached(41.3)]
    joined: list[Event] = [Joined(member(2), 50.0), stopping(0, 51.0), stopping(1, 51.0), DeadlineReached(51.1)]
    lost: list[Event] = [AgentLost(2, "gone", 60.0), stopping(0, 61.0), stopping(1, 61.0), DeadlineReached(61.1)]
    happened: list[Event] = []
    parts: list[list[Event]] = [[*met(2), DeadlineReached(30.1)], failed, joined, lost]
    for number, events in enumerate(parts):
        happened += events
        state, _ = history(policy, happened, first_term=7_000)
        assert (state.generation.number, state.generation.term) == (number, 7_000 + number)


TAKEN = [*met(), *failing(0, 1), stopping(1, 2), stopping(2, 2), DeadlineReached(3), PortTaken(3)]


def test_a_restart_whose_port_is_taken_tries_again_as_the_same_generation() -> None:
    again = [*TAKEN, DeadlineReached(3.1), PortTaken(3.1), DeadlineReached(3.2)]
    state, actions = history(replace(THREE, max_restarts=3), again)
    assert (state.phase, state.generation.number, state.restarts.number) == (Phase.RUNNING, 1, 1)
    assert silent(actions)[-3:] == [BeginGeneration(1, (0, 1, 2), 1)] * 3


def test_a_port_is_waited_for_two_seconds_after_each_failure_and_by_no_first_start() -> None:
    policy = replace(THREE, max_restarts=3)
    assert not history(policy, met())[0].may_wait_for_port
    assert history(policy, [*TAKEN, DeadlineReached(4.9)])[0].may_wait_for_port
    assert not history(policy, [*TAKEN, DeadlineReached(5.1)])[0].may_wait_for_port
    later = [DeadlineReached(5.1), *failing(0, 90), stopping(1, 90.2), stopping(2, 90.2), DeadlineReached(91)]
    assert history(policy, [*TAKEN, *later])[0].may_wait_for_port


@pytest.mark.parametrize(
    ("event", "status"),
    [
        (NodeStopping(0, Why.SIGNALLED, SIGINT, 3.05), 130),
        (NodeStopping(1, Why.SIGNALLED, SIGTERM, 3.05), 143),
        (StopRequested(Why.SIGNALLED, SIGTERM, 3.05), 143),
        (AgentLost(2, "connection closed", 3.05), 122),
    ],
    ids=["Ctrl-C", "SIGTERM on another node", "the command that started all", "a node that is lost"],
)
def test_a_job_that_waits_for_its_port_ends_at_once_when_it_has_to(event, status) -> None:
    state, _ = history(replace(THREE, max_restarts=3), [*TAKEN, event])
    assert (state.phase, state.end.status) == (Phase.ENDED, status)


def test_who_stops_the_job_while_it_makes_room_for_a_node_gives_its_status() -> None:
    joins: list[Event] = [*met(2), DeadlineReached(30.1), Joined(member(2), 40)]
    stopped_then: list[Event] = [NodeStopping(0, Why.SIGNALLED, SIGINT, 40.1), stopping(0, 40.2), stopping(1, 40.2)]
    assert history(ELASTIC, [*joins, *stopped_then])[0].end.status == 130
    assert (
        history(ELASTIC, [*joins, StopRequested(Why.SIGNALLED, SIGTERM, 40.1), *stopped_then[1:]])[0].end.status == 143
    )


def test_a_node_that_comes_when_all_have_finished_starts_nothing() -> None:
    finished = [ended(id, 41, end(id, "abcdef"[id], 39)) for id in range(2)]
    state, _ = history(ELASTIC, [*met(2), DeadlineReached(30.1), Joined(member(2), 40), *finished])
    assert (state.phase, state.end.status) == (Phase.ENDED, 0)


def test_a_node_that_comes_when_a_worker_was_not_started_yet_has_it_started_again() -> None:
    one, two = member(0), replace(member(1), workers=2)  # of the two workers there, one is started, and finishes
    finished = [ended(id, 41, end(id, "abcdef"[id], 39)) for id in range(2)]
    met_with_two: list[Event] = [Joined(one, 1), Joined(two, 1.1), DeadlineReached(31.1)]
    state, _ = history(ELASTIC, [*met_with_two, Joined(member(2), 40), *finished])
    assert (state.phase, state.end.status) == (Phase.PAUSING, None)


@pytest.mark.parametrize(("number", "status"), [(1, 137), (3, 122)])
def test_to_other_nodes_a_killed_command_is_a_lost_node(number: int, status: int) -> None:
    killed = [*met(number), NodeStopping(0, Why.FRONT_LOST, SIGTERM, 4), *(stopping(id, 5) for id in range(number))]
    assert history(replace(THREE, min_nodes=number, max_nodes=number), killed)[0].end.status == status


def test_what_ends_a_job_between_two_generations_ended_no_worker() -> None:
    between = [*met(), *failing(0, 1), stopping(1, 2), stopping(2, 2)]
    state, _ = history(replace(THREE, max_restarts=3), [*between, NodeStopping(1, Why.SIGNALLED, SIGINT, 2.5)])
    assert (state.end.status, state.end.between_generations, state.workers_may_have_begun) == (130, True, True)


# --- the time of the job

TIMED = replace(THREE, timeout=60.0, max_restarts=3)
UP = DeadlineReached(60.0)


def test_the_time_of_the_job_runs_from_its_first_start_on_through_all_generations() -> None:
    assert history(TIMED, [])[0].deadline == 3.0
    assert history(TIMED, met())[0].deadline == 60.0
    again = [*met(), *failing(0, 1), stopping(1, 2), stopping(2, 2), DeadlineReached(3)]
    state, _ = history(TIMED, again)
    assert (state.generation.number, state.deadline) == (1, 60.0)


def test_when_the_time_is_up_all_nodes_stop_and_the_status_is_124() -> None:
    state, actions = history(TIMED, [*met(), UP])
    assert silent(actions)[-1] == StopNodes((0, 1, 2), SIGTERM)
    assert state.deadline is None
    ends = [ended(id, 61, replace(stopped(id, "abcdef"[id], 61), stopped_at=60.0)) for id in range(3)]
    assert history(TIMED, [*met(), UP, *ends])[0].end.status == 124


def test_the_time_may_be_up_before_all_nodes_are_there_and_between_two_generations() -> None:
    assert history(TIMED, [*met(2), UP])[0].end.status == 124
    between = [*met(), *failing(0, 59), stopping(1, 59.5), stopping(2, 59.5)]
    assert history(TIMED, [*between, UP])[0].end.status == 124


def test_workers_that_had_finished_when_the_time_was_up_have_finished() -> None:
    """What they had left behind was being swept."""
    finished = [ended(id, 61, end(id, "abcdef"[id], 59)) for id in range(3)]
    assert history(TIMED, [*met(), UP, *finished])[0].end.status == 0


def test_the_time_stands_still_while_the_job_is_suspended() -> None:
    suspended = [*met(), JobSuspended(10.0)]
    assert history(TIMED, suspended)[0].deadline is None
    assert history(TIMED, [*suspended, JobResumed(110.0)])[0].deadline == 160.0


def test_no_generation_begins_while_the_job_is_suspended() -> None:
    short = [*met(), *failing(0, 1), stopping(1, 1.1), stopping(2, 1.1)]
    waiting, _ = history(TIMED, [*short, JobSuspended(1.2)])
    assert (waiting.phase, waiting.deadline) == (Phase.PAUSING, None)
    assert history(TIMED, [*short, JobSuspended(1.2), JobResumed(101.2)])[0].deadline == 101.1


def test_an_end_that_is_told_twice_or_by_somebody_who_takes_no_part_counts_once() -> None:
    late = [*met(2), DeadlineReached(30.1), ended(1, 40), Joined(member(2), 41)]
    state, _ = history(ELASTIC, [*late, ended(1, 42), ended(2, 43), ended(1, 44)])
    assert len(state.generation.exits) == 1
    assert not state.members[2].has_ended


# --- a notice of the end

NOTICES = Policy(min_nodes=3, max_nodes=3, max_restarts=3, notices=frozenset({SIGUSR1, SIGTERM}))
BEGUN = BeginGeneration(0, (0, 1, 2), 0)
LEAVING = [ended(0, 5), ended(1, 5), ended(2, 5)]
STOPPING = [stopping(0, 5), stopping(1, 5), stopping(2, 5)]
ABANDONED: dict[str, tuple[list[Event], int]] = {
    "there was no notice": ([*met(), *LEAVING], 0),
    "Ctrl-C came after it": ([*met(), NodeNoticed(1, SIGUSR1), NodeStopping(1, Why.SIGNALLED, SIGINT, 4), *STOPPING],
        130),
    "the user stopped it for good, by a signal that is a notice": (
        [*met(), Abandoned(), NodeNoticed(0, SIGTERM), NodeStopping(0, Why.SIGNALLED, SIGTERM, 4), *STOPPING], 143),
    "the user's command was lost": ([*met(), StopRequested(Why.FRONT_LOST, SIGTERM, 4), *STOPPING], 122),
    "the user stopped it and then did not want to wait": (
        [*met(), NodeStopping(1, Why.SIGNALLED, SIGTERM, 4), NodeEscalated(1, SIGINT, 4.5), *STOPPING], 143),
    "it came to a node that had ended, when all had": ([*met(), *LEAVING, NodeNoticed(1, SIGUSR1)], 0),
    "a node was lost": ([*met(), NodeNoticed(1, SIGUSR1), AgentLost(2, "silent", 4), stopping(0, 5), stopping(1, 5)],
        122),
}  # fmt: skip
NOTICED: dict[str, tuple[list[Event], int]] = {
    "it came to one node": ([*met(), NodeNoticed(1, SIGUSR1), *LEAVING], SIGUSR1),
    "it came when a node had ended": ([*met(), ended(0, 4), NodeNoticed(1, SIGUSR1), *LEAVING[1:]], SIGUSR1),
    "it stops a node": ([*met(), NodeNoticed(1, SIGTERM), NodeStopping(1, Why.SIGNALLED, SIGTERM, 4), *STOPPING],
        SIGTERM),
    "it came to who has started the agents": ([*met(), StopRequested(Why.SIGNALLED, SIGTERM, 4), *STOPPING], SIGTERM),
    "it has ended the user's command before a node told of it": (
        [*met(), StopRequested(Why.FRONT_LOST, SIGTERM, 3), NodeStopping(1, Why.SIGNALLED, SIGTERM, 4), *STOPPING],
        SIGTERM),
    "a worker lost contact with one that had left": (
        [*met(), NodeNoticed(1, SIGUSR1), NodeStopping(2, Why.FAILED, SIGTERM, 5),
        ended(2, 5, end(2, "c", 5, code=1, stderr_tail=FOLLOWING)), ended(0, 5), stopping(1, 5)], SIGUSR1),
}  # fmt: skip


@pytest.mark.parametrize("sentence", NOTICED)
def test_a_job_goes_back_after_a_notice_if(sentence: str) -> None:
    events, signum = NOTICED[sentence]
    assert silent(history(NOTICES, events)[1])[-1] == EndJob(128 + signum, requeue=signum)


@pytest.mark.parametrize("sentence", ABANDONED)
def test_a_job_does_not_go_back_if(sentence: str) -> None:
    events, status = ABANDONED[sentence]
    policy = Policy(min_nodes=3, max_nodes=3, notices=NOTICES.notices)
    assert silent(history(policy, events)[1])[-1] == EndJob(status)


def test_a_worker_that_fails_after_a_notice_is_a_failure_like_any_other() -> None:
    events = [*met(), NodeNoticed(0, SIGUSR1), *failing(1, 5.0), stopping(0, 5.2), stopping(2, 5.3)]
    state, actions = history(NOTICES, [*events, DeadlineReached(9.0)])
    assert silent(actions) == [BEGUN, StopNodes((0, 2), SIGTERM), ReportFailure(0.0), BeginGeneration(1, (0, 1, 2), 1)]
    assert state.generation.notice == 0


def test_a_node_that_is_gone_before_the_start_is_named() -> None:
    joined: list[Event] = [Joined(member(0, 0), 0), Joined(member(1, 2), 1), AgentLost(1, "connection closed", 2)]
    assert history(THREE, joined)[0].generation.lost == ("node 2 (b): connection closed",)
    assert history(THREE, [*met(2), AgentLost(1, "connection closed", 2)])[0].generation.lost == (
        "b: connection closed",
    )


def test_the_end_of_a_node_copies_no_list_of_all_that_have_ended_before() -> None:
    number = 300
    nodes = [Member(id=id, host=f"node{id}", workers=2, requested_rank=None) for id in range(number)]
    exits = {id: (end(2 * id, f"node{id}", 5.0), end(2 * id + 1, f"node{id}", 5.0)) for id in range(number)}
    state, _ = history(
        Policy(min_nodes=number, max_nodes=number),
        [*(Joined(node, 0.0) for node in nodes), *(NodeEnded(id, exits[id], None, 5.0) for id in range(number - 1))],
    )
    assert len(state.generation.exits) == 2 * (number - 1)
    records = [record for record in asdict(state).values() if isinstance(record, Struct)]
    values = [value for record in records for value in asdict(record).values()]
    assert max(len(value) for value in values if isinstance(value, tuple)) <= 2
