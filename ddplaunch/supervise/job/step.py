"""The decision itself: a state and an event give the next state and what is to be done. It does nothing itself."""

from __future__ import annotations

from signal import SIGTERM

from msgspec.structs import replace

from ddplaunch import exitcodes
from ddplaunch.supervise.job import actions, events, hanging
from ddplaunch.supervise.job.ending import NO_HARM, Result, all_ended, end, stop
from ddplaunch.supervise.job.seating import disagreements, hint_to_refused, joined, missing, order, waiting, why_refused
from ddplaunch.supervise.job.state import NO_EXITS, NO_NODE_STILL, OWN, Member, Members, Phase, Policy, State
from ddplaunch.supervise.outcome import Why

FIRST_NOTICE = 3.0  # seconds until it is first reported which nodes the job waits for
NEXT_NOTICE = 30.0  # seconds from one such notice to the next
PORT_TIMEOUT = 2.0  # seconds that a restart waits for its port
_PORT_AGAIN = 0.1  # seconds from one try to the next
OWN_END = "its ddplaunch has ended"
_CUT_OFF = "cut off from the command that started it"  # by ssh or the like
EARLY_EXIT_WARNING = 60.0  # seconds after which nodes that have finished are named while the others run on


def begin(policy: Policy, at: float) -> Result:
    """Wait for the agents."""
    state = State(
        policy=policy,
        rdzv_deadline=at + policy.rdzv_timeout,
        notice_at=at + FIRST_NOTICE,
        job_deadline=None if policy.timeout is None else at + policy.timeout,
    )
    return state, ()


def step(state: State, event: events.Event) -> Result:
    """Return the state after `event` and what is to be done."""
    if state.phase is Phase.ENDED:
        return state, (actions.Refuse(event.member.id, "the job has ended", exitcodes.RENDEZVOUS),) if isinstance(
            event, events.Joined
        ) else ()
    match event:
        case events.Joined(member, at):
            return _joined(state, member, at)
        case events.Left(who, reason, at):
            return _left(state, who, reason, at) if who in state.members else (state, ())
        case events.NodeGivenUp(at):
            state = replace(state, given_up=state.given_up + 1)
            return _start(state, at) if state.phase is Phase.RENDEZVOUS and _is_complete(state) else (state, ())
        case events.NodeStopping(who, why, signum):
            return _stopping(_noted(state, signum, why), event) if who in state.members else (state, ())
        case events.NodeNoticed(who, signum):
            return (_noted(state, signum), ()) if _is_awaited(state, who) else (state, ())
        case events.NodeStill(who):
            return hanging.still(state, event) if _is_awaited(state, who) else (state, ())
        case events.NodeEscalated(who, signum, _):
            return _escalated(_noted(state, signum), who, signum)
        case events.StopRequested(why, signum, at, by_cluster):
            return _job_stopping(_noted(state, signum, why), why, signum, at, by_cluster=by_cluster)
        case events.NodeEnded(who, _, _, at):
            return _node_ended(state, event, at) if _is_awaited(state, who) else (state, ())
        case events.BeginFailed(failure):
            return end(replace(state, why=Why.FAILED, start_failure=failure))
        case events.PortTaken(at):
            return _port_taken(state, at), ()
        case events.JobSuspended(at):
            return (replace(state, suspended_at=at), ()) if state.suspended_at is None else (state, ())
        case events.JobResumed(at):
            return _resumed(state, at), ()
        case events.TimeoutHeld(who, held):
            return _held(state, who, held=held) if _is_awaited(state, who) else (state, ())
        case events.DeadlineReached(at):
            return _deadline(state, at)


def _noted(state: State, signum: int, why: Why = Why.SIGNALLED) -> State:
    """Remember that the end was announced, or that the user requested it."""
    if why is not Why.SIGNALLED:
        return state
    if signum in state.policy.notices:
        return state if state.notice else replace(state, notice=signum)
    return replace(state, abandoned=True) if signum not in (0, SIGTERM) else state


def _held(state: State, who: int, *, held: bool) -> Result:
    """Have the time limits wait for the debugger of a node, or no longer; say once of each other node that they do."""
    if not held:
        return replace(state, held=state.held - {who}), ()
    policy = state.policy
    limits = [name for name, limit in (("--timeout", policy.timeout), ("--hang-timeout", policy.hang_timeout)) if limit]
    is_said = who == OWN or who in state.named_as_held or not limits
    state = replace(state, held=state.held | {who}, named_as_held=state.named_as_held | {who})
    verb = "wait" if len(limits) > 1 else "waits"
    word = f"{state.members[who]} holds a worker in a debugger: {' and '.join(limits)} {verb} until it is left"
    return state, () if is_said else (actions.Print(word),)


def _is_awaited(state: State, who: int) -> bool:
    """Whether the end of this generation is yet to come from there."""
    member = state.members.get(who)
    return member is not None and member.place is not None and not member.has_ended


# --- members


def _joined(state: State, member: Member, at: float) -> Result:
    if (reason := why_refused(state, member)) is not None:
        return state, (actions.Refuse(member.id, reason, exitcodes.USAGE, hint_to_refused(state, member)),)
    state = replace(state, members=state.members.with_member(member))
    if state.phase is Phase.RENDEZVOUS:
        return _start_if_complete(state, at, regrouping=state.generation >= 0)
    if state.phase is Phase.RUNNING and not any(other.has_ended for other in state.members.values()):
        stopped, then = stop(state, Why.NODE_JOINED, SIGTERM, at)
        return stopped, (actions.Print(f"{member.host} joins: all workers start again with it"), *then)
    return state, ()


def _left(state: State, who: int, reason: str, at: float) -> Result:
    member = state.members[who]
    state = replace(state, members=state.members.without(who))
    if state.phase in (Phase.RENDEZVOUS, Phase.PAUSING) and state.needs_all:
        named = member if member.wanted is None else replace(member, place=member.wanted)
        return end(replace(state, why=Why.NODE_LOST, lost=(f"{named}: {reason}",), ended_idle=True))
    if state.phase is Phase.RENDEZVOUS:
        met, then = _start_if_complete(state, at, regrouping=state.generation >= 0)
        return met, (actions.Print(f"{member.host} has left: {reason}"), *then)
    if member.place is None or member.has_ended:
        return all_ended(state, at)
    state = replace(state, has_begun=True)  # perhaps: it has not reported whether it had started workers
    if member.is_leaving:
        return all_ended(state, at)
    state = replace(state, lost=(*state.lost, f"{member}: {reason}"))
    loss = actions.Print(f"{member} is lost: {reason}")
    if state.phase is Phase.RUNNING:
        stopped, then = stop(state, Why.NODE_LOST, SIGTERM, at)
        return stopped, (loss, *then)
    if state.why in NO_HARM:
        state = replace(state, why=Why.NODE_LOST)
    ended, then = all_ended(state, at)
    return ended, (loss, *then)


def _start_if_complete(state: State, at: float, *, regrouping: bool) -> Result:
    """Start if enough agents have joined; `regrouping` is no first start, and does not wait for more than these."""
    number, policy = len(state.members), state.policy
    if _is_complete(state) or (number >= policy.min_nodes and regrouping):
        return _start(state, at)
    deadline = at + policy.last_call if number >= policy.min_nodes else None
    return replace(state, phase_deadline=deadline), ()


def _is_complete(state: State) -> bool:
    policy = state.policy
    return len(state.members) >= max(policy.min_nodes, policy.max_nodes - state.given_up)


def _start(state: State, at: float) -> Result:
    seated = order(state.members)
    generation = state.generation + 1
    newcomers = any(member.place is None for member in seated)
    members = Members.of(
        replace(member, place=place, has_ended=False)
        for member, place in sorted(((m, p) for p, m in enumerate(seated)), key=lambda pair: pair[0].id)
    )
    state = replace(
        state,
        phase=Phase.RUNNING,
        members=members,
        why=None,
        signum=0,
        suspended_at=None,
        notice=0,  # these workers have not received it
        generation=generation,
        generation_at=at,
        node_exits=NO_EXITS,
        still=NO_NODE_STILL,
        held=frozenset(),
        named_as_held=frozenset(),
        lost=(),
        phase_deadline=None,
        rdzv_deadline=None,
        notice_at=None,
    )
    warnings = tuple(map(actions.Print, disagreements(seated))) if newcomers else ()
    return state, (
        *warnings,
        actions.BeginGeneration(generation, tuple(member.id for member in seated), state.restarts),
    )


def _port_taken(state: State, at: float) -> State:
    """Take the generation back that was to begin, of which no agent knows yet; it is tried again after a pause."""
    return replace(
        state,
        phase=Phase.PAUSING,
        members=Members.of(replace(member, has_ended=True) for member in state.members.values()),
        generation=state.generation - 1,
        phase_deadline=at + _PORT_AGAIN,
        port_deadline=at + PORT_TIMEOUT if state.port_deadline is None else state.port_deadline,
    )


# --- the end of a generation


def _stopping(state: State, event: events.NodeStopping) -> Result:
    who, why, signum, at = event.id, event.why, event.signum, event.at
    leaves = why is Why.FRONT_LOST and who != OWN
    may_come_back = state.members[who].place is None and who != OWN and not state.needs_all
    if leaves or may_come_back:
        # an agent that takes no part yet may come back with other options; one that has lost its front will not
        left, then = _left(state, who, _CUT_OFF if state.policy.called else OWN_END, at)
        return left, (*then, actions.Drop(who) if leaves else actions.Release(who, signum))
    if who != OWN:
        from ddplaunch.supervise.job import leaving  # one node needs none of it

        if leaving.leaves(state, event):
            return _leaving(leaving.marked(state, who, at), leaving.announced(state, who), event)
    if state.phase is Phase.RUNNING:
        return stop(state, why, signum or SIGTERM, at, but=who, by_cluster=event.by_cluster)
    if state.phase in (Phase.RENDEZVOUS, Phase.PAUSING):
        return end(replace(state, why=why, signum=signum, ended_idle=True))
    if state.why is Why.NODE_JOINED or (state.why is Why.NODE_LEFT and why is not Why.FAILED):
        state = replace(state, why=why, signum=signum)  # the workers are being stopped for nothing worse
    return replace(state, halted=state.halted or why is not Why.FAILED), ()


def _leaving(state: State, said: str, event: events.NodeStopping) -> Result:
    """Go on without this node, of which the state knows that it leaves."""
    who, at, announced = event.id, event.at, actions.Print(said)
    if not _is_awaited(state, who):
        left, then = _left(state, who, OWN_END, at)
        if state.phase is Phase.PAUSING:
            left = replace(left, phase_deadline=max(left.phase_deadline or at, left.regroup_at))
        starts_again = state.phase in (Phase.STOPPING, Phase.PAUSING)
        return left, (*((announced,) if starts_again else ()), *then, actions.Release(who, event.signum))
    if state.phase is Phase.RUNNING:
        stopped, then = stop(state, Why.NODE_LEFT, SIGTERM, at, but=who)
        return stopped, (announced, *then)
    return replace(state, why=Why.NODE_LEFT if state.why is Why.NODE_JOINED else state.why), (announced,)


def _escalated(state: State, who: int, signum: int) -> Result:
    """Kill everywhere and end the job; a second SIGTERM to a node that leaves concerns that node alone."""
    member = state.members.get(who)
    if member is not None and member.is_leaving:
        if signum == SIGTERM:
            return state, ()
        state = replace(state, why=Why.SIGNALLED, signum=signum)
    others = tuple(member.id for member in state.taking_part if not member.has_ended and member.id != who)
    return replace(state, halted=True), (actions.KillNodes(others),) if others else ()


def _job_stopping(state: State, why: Why, signum: int, at: float, *, by_cluster: bool = False) -> Result:
    if state.phase is Phase.RUNNING:
        return stop(state, why, signum or SIGTERM, at, by_cluster=by_cluster)
    if state.phase in (Phase.RENDEZVOUS, Phase.PAUSING):
        return end(replace(state, why=why, signum=signum, ended_idle=True))
    if state.why in NO_HARM:
        state = replace(state, why=why, signum=signum)
    return replace(state, halted=True), ()


def _node_ended(state: State, event: events.NodeEnded, at: float) -> Result:
    member = state.members[event.id]
    node_exits = state.node_exits.with_item(event.id, event.exits)
    if member.is_leaving:
        rest = state.members.without(event.id)
        has_begun = state.has_begun or bool(event.exits or event.left)
        ended, then = all_ended(replace(state, members=rest, node_exits=node_exits, has_begun=has_begun), at)
        return ended, (actions.Release(event.id, SIGTERM), *then)
    state = replace(
        state,
        members=state.members.with_member(replace(member, has_ended=True)),
        node_exits=node_exits,
        has_begun=state.has_begun or bool(event.exits or event.left),
        start_failure=state.start_failure or event.start_failure,
        left=(*state.left, *event.left),
        halted=state.halted or bool(event.left),  # the next generation would run beside it
    )
    if state.phase is Phase.RUNNING and state.notice_at is None:
        state = replace(state, notice_at=at + EARLY_EXIT_WARNING)
    return all_ended(state, at)


# --- time


def _deadline(state: State, at: float) -> Result:
    if state.deadline is None or at < state.deadline:
        return state, ()
    if state.job_deadline is not None and at >= state.job_deadline and state.has_time_limit:
        return _job_stopping(state, Why.TIMED_OUT, SIGTERM, at)
    if state.phase_deadline is not None and at >= state.phase_deadline:
        if state.phase is Phase.RENDEZVOUS:
            return _start(state, at)
        return _rendezvous(replace(state, phase_deadline=None), at)
    if state.rdzv_deadline is not None and at >= state.rdzv_deadline:
        why = Why.NOT_MET if state.generation < 0 else Why.NODE_LOST
        return end(replace(state, why=why), f"the rendezvous timed out: {joined(state)}; missing: {missing(state)}")
    if state.phase is Phase.RENDEZVOUS:
        return replace(state, notice_at=at + NEXT_NOTICE), (actions.Print(waiting(state)),)
    finished = ", ".join(str(member) for member in state.taking_part if member.has_ended)
    text = f"{finished} finished a minute ago while the others run on: a collective that waits for it never ends"
    return replace(state, notice_at=None), (actions.Print(text),)


def _resumed(state: State, at: float) -> State:
    """Move the deadlines by the time that the job was suspended."""
    if state.suspended_at is None:
        return state
    stood_still = at - state.suspended_at
    deadline, job_deadline = state.phase_deadline, state.job_deadline
    if deadline is not None and state.phase is not Phase.RENDEZVOUS:
        deadline += stood_still
    if job_deadline is not None:
        job_deadline += stood_still
    return replace(state, suspended_at=None, phase_deadline=deadline, job_deadline=job_deadline)


def _rendezvous(state: State, at: float) -> Result:
    state = replace(
        state, phase=Phase.RENDEZVOUS, rdzv_deadline=at + state.policy.rdzv_timeout, notice_at=at + FIRST_NOTICE
    )
    return _start_if_complete(state, at, regrouping=True)
