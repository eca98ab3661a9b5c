"""The decision about the job: a state and an event give the next state and the actions to carry out.

`step` is the table of events. How a generation ends, and what follows, is in `ending`. Who may join, and what it is told, is in
`rendezvous`. `limits` are those of time.
"""

from __future__ import annotations

from signal import SIGHUP, SIGINT, SIGTERM

from msgspec.structs import replace

from ddplaunch.launcher.decide.job import actions, events, rendezvous
from ddplaunch.launcher.decide.job.ending import HARMLESS, MAY_RESTART, Result, end, go_on_if_ended, stop
from ddplaunch.launcher.decide.job.limits import on_limits_paused, on_node_idle, on_resumed
from ddplaunch.launcher.decide.job.starting import (
    is_complete,
    on_acknowledged,
    start,
    start_if_enough,
    take_back,
    waiting,
)
from ddplaunch.launcher.decide.job.state import BETWEEN, FIRST_NOTICE, SELF_ID, Member, Members, Phase, Policy, State
from ddplaunch.launcher.decide.job.succession import (
    AT_ONCE,
    SETTLE,
    gathered,
    may_go_on,
    with_begun,
    with_ended,
    with_unbegun,
)
from ddplaunch.spec.outcome import CUT_OFF, OWN_END, Why
from ddplaunch.system import exitcodes
from ddplaunch.system.words import signal_name

NEXT_NOTICE = 30.0  # seconds from one such line to the next
EARLY_EXIT_WARNING = 60.0  # seconds after which nodes that have finished are named while the others run on

# seconds from SIGTERM to a node until the next generation: somebody who deletes the whole job does not reach all nodes at
# once, and node 0, with which the job ends, may be the last
REGROUP = 2.0


def begin(policy: Policy, at: float) -> Result:
    """Return the first state, in which the job waits for the agents."""
    state = State(
        policy=policy,
        rdzv_deadline=at + policy.rdzv_timeout,
        notice_at=at + FIRST_NOTICE,
        job_deadline=None if policy.timeout is None else at + policy.timeout,
    )
    return state, ()


def step(state: State, event: events.Event) -> Result:
    """Return the state after `event`, and the actions to carry out."""
    if state.phase is Phase.ENDED:
        if isinstance(event, events.Joined):
            return state, (actions.Refuse(event.member.id, "the job has ended", exitcodes.RENDEZVOUS),)
        return state, ()
    match event:
        # members
        case events.Joined(member, at):
            return _on_joined(state, member, at)
        case events.AgentLost(id, reason, at, has_ended, answered_at):
            state = _without_surprise(state, id, answered_at) if not has_ended else state
            return _on_agent_lost(state, id, reason, at, has_ended=has_ended) if id in state.members else (state, ())
        case events.Acknowledged(id, term, at):
            return on_acknowledged(state, id, at) if term == state.term else (state, ())
        case events.CoordinatorEnded(at):
            state = replace(with_ended(state, state.lost_votes), lost_votes=())
            return go_on_if_ended(gathered(state, at), at)
        case events.NodeGivenUp(at):
            state = replace(state, given_up=state.given_up + 1)
            return start(state, at) if state.phase is Phase.RENDEZVOUS and is_complete(state) else (state, ())
        case events.Withdrawn():
            return _on_withdrawn(state, event)
        case events.OwnUnfit(reason):
            return _on_own_unfit(state, reason)
        # the generation
        case events.BeginFailed(failure):
            return end(replace(state, why=Why.FAILED, start_failure=failure))
        case events.PortTaken(at):
            return take_back(state, at), ()
        case events.NodeStopping(id, why, signum):
            return _on_node_stopping(_note(state, signum, why), event) if id in state.members else (state, ())
        case events.NodeEnded(id):
            return _on_node_ended(state, event) if state.runs(id) else (state, ())
        case events.NodeIdle(id):
            return on_node_idle(state, event) if state.runs(id) else (state, ())
        case events.LimitsPaused(id, paused):
            return on_limits_paused(state, id, paused=paused) if state.runs(id) else (state, ())
        # the user, or a scheduler
        case events.NodeNoticed(id, signum):
            return (_note(state, signum), ()) if state.runs(id) else (state, ())
        case events.NodeEscalated(id, signum):
            return _on_escalated(_note(state, signum), id, signum)
        case events.StopRequested(why, signum, at, by_cluster):
            return _stop_job(_note(state, signum, why), why, signum, at, by_cluster=by_cluster)
        case events.Abandoned():
            return replace(state, abandoned=True), ()
        case events.PastStop():
            return _on_past_stop(state, event)
        case events.JobSuspended(at):
            return (replace(state, suspended_at=at) if state.suspended_at is None else state), ()
        case events.JobResumed(at):
            return on_resumed(state, at), ()
        # time
        case events.DeadlineReached(at):
            return _on_deadline(state, at)


def _note(state: State, signum: int, why: Why = Why.SIGNALLED) -> State:
    """Remember that a notice announced the end of the job, or that the user stopped it by another signal than SIGTERM."""
    if why is not Why.SIGNALLED:
        return state
    if signum in state.policy.notices:
        return state if state.notice else replace(state, notice=signum)
    return replace(state, abandoned=True) if signum not in (0, SIGTERM) else state


# --- members


def _on_joined(state: State, member: Member, at: float) -> Result:
    """Refuse an agent that cannot take part; else start if enough agents have joined, or start again with the late agent."""
    if (reason := rendezvous.why_refused(state, member)) is not None:
        return state, (actions.Refuse(member.id, reason, exitcodes.USAGE, rendezvous.hint_to_refused(state, member)),)
    state = replace(state, members=state.members.with_member(member))
    if state.phase is Phase.RENDEZVOUS:
        return start_if_enough(state, at, is_restart=state.generation >= 0)
    if state.gather_until is not None:
        return go_on_if_ended(gathered(with_unbegun(with_begun(state, member), member), at), at)
    if state.spares:
        return state, (actions.Print(f"{member.host} is a spare: it waits until a node is lost or leaves"),)
    if state.phase is Phase.RUNNING and not any(other.has_ended for other in state.members.values()):
        state, then = stop(state, Why.NODE_JOINED, SIGTERM, at)
        return state, (actions.Print(f"{member.host} joins: all workers start again with it"), *then)
    return state, ()


def _on_withdrawn(state: State, event: events.Withdrawn) -> Result:
    """Report that a node will not join; end a job that needs the node, or start if all other nodes are there."""
    policy, text = state.policy, f"{event.node} does not take part: {event.reason}"
    if not policy.replaceable and not policy.dispatched:  # a dispatcher sends `NodeGivenUp` for the same node
        state = replace(state, given_up=state.given_up + 1)
    if state.phase is not Phase.RENDEZVOUS:
        return state, (actions.Print(text),)
    if state.needs_all or policy.max_nodes - state.given_up < policy.min_nodes:
        return end(replace(state, why=Why.NOT_MET, ended_idle=True), text, event.hint)
    state, then = start(state, event.at) if is_complete(state) else (state, ())
    return state, (actions.Print(text), *then)


def _without_surprise(state: State, id: int, answered_at: float) -> State:
    """Begin no generation without this node as long as it would take a refused connection for the end of this coordinator."""
    if not state.counts(id):
        return state
    return replace(state, regroup_at=max(state.regroup_at, answered_at + AT_ONCE))


def _on_agent_lost(state: State, id: int, reason: str, at: float, *, has_ended: bool) -> Result:
    """Go on without this agent, if the job can: start with the other agents, or stop what runs and decide then."""
    member = state.members[id]
    state = replace(state, members=state.members.without(id))
    if has_ended:
        state = gathered(with_ended(state, member.votes), at)
    if state.phase in BETWEEN and state.needs_all:
        named = member if member.requested_rank is None else replace(member, node_rank=member.requested_rank)
        return end(replace(state, why=Why.NODE_LOST, lost=(f"{named}: {reason}",), ended_idle=True))
    counted = id in state.unacknowledged or any(vote.term == state.term for vote in member.votes)
    was_to_begin = state.phase is Phase.ANNOUNCING and counted
    if was_to_begin:
        state = waiting(state, at)
    if state.phase is Phase.RENDEZVOUS:
        state, then = start_if_enough(state, at, is_restart=was_to_begin or state.generation >= 0)
        return state, (actions.Print(f"{member.host} has left: {reason}"), *then)
    if not member.runs:
        state, then = go_on_if_ended(state, at)
        was_spare = state.policy.spares and member.node_rank is None
        how = "has left" if reason == OWN_END else f"is lost: {reason}"
        return state, (actions.Print(f"{member.host}, a spare, {how}"), *then) if was_spare else then
    state = replace(state, has_begun=True)  # perhaps: it has not reported whether it had started workers
    if member.is_leaving:
        return _go_on_without_leaving(state, at)
    state = replace(state, lost=(*state.lost, f"{member}: {reason}"))
    if state.phase is Phase.RUNNING:
        state, then = stop(state, Why.NODE_LOST, SIGTERM, at)
    else:
        why = Why.NODE_LOST if state.why in HARMLESS else state.why
        state, then = go_on_if_ended(replace(state, why=why), at)
    return state, (actions.Print(f"{member} is lost: {reason}"), *then)


# --- the end of a generation


def _on_node_stopping(state: State, event: events.NodeStopping) -> Result:
    """Stop all other nodes too, unless the job goes on without this node."""
    id, why, signum, at = event.id, event.why, event.signum, event.at
    if id != SELF_ID:
        # one command has started all agents: a signal to one is for the job
        stays_alone = state.members[id].node_rank is None and not state.needs_all and not state.policy.dispatched
        if why is Why.FRONT_LOST or stays_alone:
            state, then = _on_agent_lost(state, id, CUT_OFF if state.policy.dispatched else OWN_END, at, has_ended=True)
            # an agent that takes no part yet may come back with other options; one that has lost its front will not
            return state, (*then, actions.Drop(id) if why is Why.FRONT_LOST else actions.Release(id, signum))
        if _leaves_job(state, event):
            return _on_node_leaving(state, event)
    elif (_has_heirs(state) or _is_waited_for(state)) and _leaves_job(state, event):
        return _on_own_leaving(state, event)
    elif why is Why.FRONT_LOST and (state.electorates or _is_waited_for(state)):
        return _leave_to_others(state, event)
    if state.phase is Phase.RUNNING:
        return stop(state, why, signum or SIGTERM, at, but=id, by_cluster=event.by_cluster)
    if state.phase in BETWEEN:
        return end(replace(state, why=why, signum=signum, ended_idle=True))
    if state.gather_until is not None and why is not Why.FAILED:
        return _stop_gathering(state, why, signum, at)
    if state.why is Why.NODE_JOINED or (why is not Why.FAILED and _was_to_go_on(state)):
        state = replace(state, why=why, signum=signum)  # the workers were being stopped for nothing worse
    return replace(state, halted=state.halted or why is not Why.FAILED), ()


def _on_escalated(state: State, id: int, signum: int) -> Result:
    """Kill everywhere and end the job; a second SIGTERM to a node that leaves concerns that node alone."""
    member = state.members.get(id)
    if member is not None and member.is_leaving:
        if signum == SIGTERM:
            return state, ()
        state = replace(state, why=Why.SIGNALLED, signum=signum)
    others = tuple(other for other in state.running if other != id)
    return replace(state, halted=True), (actions.KillNodes(others),) if others else ()


def _stop_job(state: State, why: Why, signum: int, at: float, *, by_cluster: bool = False) -> Result:
    """Stop all nodes, and start nothing after it; end the job at once where no generation runs."""
    if state.phase is Phase.RUNNING:
        return stop(state, why, signum or SIGTERM, at, by_cluster=by_cluster)
    if state.phase in BETWEEN:
        return end(replace(state, why=why, signum=signum, ended_idle=True))
    if state.gather_until is not None:
        return _stop_gathering(state, why, signum, at)
    if _was_to_go_on(state):
        state = replace(state, why=why, signum=signum)
    return replace(state, halted=True), ()


def _was_to_go_on(state: State) -> bool:
    """Whether the workers are being stopped for what ends no job: nodes came or left, or were lost while enough remain."""
    policy = state.policy
    is_elastic = policy.has_successors and len(state.members) >= policy.min_nodes
    return state.why in HARMLESS or (state.why is Why.NODE_LOST and is_elastic)


def _stop_gathering(state: State, why: Why, signum: int, at: float) -> Result:
    """End a job that waits for the nodes of a lost coordinator, once these nodes know too. Else they would go on alone."""
    until = None if state.gather_until is None else min(state.gather_until, at + SETTLE)
    return go_on_if_ended(gathered(replace(state, why=why, signum=signum, halted=True, gather_until=until), at), at)


def _on_past_stop(state: State, event: events.PastStop) -> Result:
    """Do what the lost coordinator was about to do: end the job after a signal, or decide what follows a failure."""
    why, signum = event.why, event.signum
    is_stopping_after_it = state.took_over and state.phase is Phase.STOPPING
    if why in (Why.FAILED, Why.HUNG) and is_stopping_after_it and not state.halted:
        return replace(state, why=why), ()
    if why is not Why.SIGNALLED or state.halted:
        return state, ()
    state = _note(state, signum)
    if is_stopping_after_it:
        return _stop_gathering(state, why, signum, event.at)
    return _stop_job(state, why, signum, event.at)


def _on_node_ended(state: State, event: events.NodeEnded) -> Result:
    """Note how the workers of this node ended; after the last node, decide what follows."""
    member = state.members[event.id]
    state = replace(
        state,
        node_exits=state.node_exits.with_item(event.id, event.exits),
        has_begun=state.has_begun or bool(event.exits or event.leftovers),
    )
    if member.is_leaving and event.id != SELF_ID:
        state = with_ended(replace(state, members=state.members.without(event.id)), member.votes)
        state, then = _go_on_without_leaving(state, event.at)
        return state, (actions.Release(event.id, member.leaves_by), *then)
    state = replace(
        state,
        members=state.members.with_member(replace(member, has_ended=True)),
        start_failure=state.start_failure or event.start_failure,
        leftovers=(*state.leftovers, *event.leftovers),
        halted=state.halted or bool(event.leftovers),  # the next generation would run beside these processes
    )
    if member.is_leaving:
        return _go_on_without_leaving(state, event.at)
    if state.phase is Phase.STOPPING and state.signum == SIGINT and len(state.node_exits) == 1 and state.running:
        # there a worker may wait in C for one of these, and only SIGKILL ends it
        return state, (actions.StopNodes(state.running, SIGINT, others_ended=True),)
    if state.phase is Phase.RUNNING and state.notice_at is None:
        state = replace(state, notice_at=event.at + EARLY_EXIT_WARNING)
    return go_on_if_ended(state, event.at)


# --- a node that leaves: SIGTERM came to one agent of an elastic job, as before a pod or spot machine is taken, or SIGHUP, since
# --- its terminal was closed


def _leaves_job(state: State, event: events.NodeStopping) -> bool:
    """Whether this node leaves a job that goes on without it, or waits for another in its place; else the job ends."""
    policy = state.policy
    is_told = event.why is Why.SIGNALLED and event.signum in (SIGTERM, SIGHUP) and not event.by_cluster
    may_leave = policy.may_leave and policy.min_nodes < policy.max_nodes and SIGTERM not in policy.notices
    return is_told and may_leave and not _is_ending(state) and _goes_on_without(state, event.id)


def _goes_on_without(state: State, id: int) -> bool:
    return state.policy.replaceable or _staying(state, id) >= state.policy.min_nodes


def _is_ending(state: State) -> bool:
    """Whether no generation follows the one that is being stopped."""
    return state.phase is Phase.STOPPING and (state.halted or state.why not in MAY_RESTART)


def _staying(state: State, id: int) -> int:
    """Return how many members stay when this one leaves."""
    return sum(member.id != id and not member.is_leaving for member in state.members.values())


def _on_node_leaving(state: State, event: events.NodeStopping) -> Result:
    """Go on without this node: its agent ends once the generation has ended there, and all other nodes start again."""
    id, at, member = event.id, event.at, state.members[event.id]
    lacking = state.policy.min_nodes - _staying(state, id)
    others = f"once {lacking} more {'has' if lacking == 1 else 'have'} joined" if lacking > 0 else "without it"
    announces = actions.Print(f"{member} leaves ({signal_name(event.signum)}): all workers start again {others}")
    members = state.members.with_member(replace(member, leaves_by=event.signum))
    state = replace(state, members=members, regroup_at=at + REGROUP)
    if not member.runs:
        starts_again = state.phase in (Phase.STOPPING, Phase.PAUSING, Phase.ANNOUNCING)
        state, then = _on_agent_lost(state, id, OWN_END, at, has_ended=True)
        if state.phase is Phase.PAUSING:
            state = replace(state, phase_deadline=max(state.phase_deadline or at, state.regroup_at))
        return state, (*((announces,) if starts_again else ()), *then, actions.Release(id, event.signum))
    if state.phase is Phase.RUNNING:
        state, then = stop(state, Why.NODE_LEFT, SIGTERM, at, but=id)
        return state, (announces, *then)
    return replace(state, why=Why.NODE_LEFT if state.why is Why.NODE_JOINED else state.why), (announces,)


def _has_heirs(state: State) -> bool:
    """Whether the nodes that stay can go on without this one, of which one takes over. Spares alone cannot."""
    if not state.policy.has_successors or not state.electorates:
        return False
    leaving = [one for one in state.members.values() if one.id == SELF_ID or one.is_leaving]
    staying = Members.of(one for one in state.members.values() if one not in leaving)
    if state.gather_until is not None:  # others are still to come
        return any(one.votes for one in staying.values())
    left = with_ended(state, tuple(vote for one in leaving for vote in one.votes))
    return may_go_on(replace(left, members=staying, took_over=True))


def _is_waited_for(state: State) -> bool:
    """Whether the other nodes wait for node 0 to be started again, should it end: nothing has been announced yet."""
    policy = state.policy
    return policy.has_successors and policy.replaceable and not state.electorates and len(state.members) > 1


def _go_on_without_leaving(state: State, at: float) -> Result:
    """Go on once a node that leaves has ended; if node 0 has, too, hand over when all have, which the others then know of."""
    own = state.members[SELF_ID]
    if not own.is_leaving or not own.has_ended:
        return go_on_if_ended(state, at)
    if any(one.is_leaving and one.runs for one in state.members.values()):
        return state, ()
    if not _is_ending(state):
        if _has_heirs(state):
            return _hand_over(state)
        state = replace(state, why=Why.SIGNALLED, signum=own.leaves_by, halted=True)
    return go_on_if_ended(state, at)


def _on_own_leaving(state: State, event: events.NodeStopping) -> Result:
    """Have another node take over once the workers here have ended; they may save something, as all workers do."""
    own = replace(state.members[SELF_ID], leaves_by=event.signum)
    what = "another node takes over" if state.electorates else "the others wait until node 0 is started again"
    announces = actions.Print(f"{own} leaves ({signal_name(event.signum)}): {what}")
    state = replace(state, members=state.members.with_member(own))
    if not own.runs:
        state, then = _hand_over(state)
    elif state.phase is Phase.RUNNING:
        state, then = stop(state, Why.NODE_LEFT, SIGTERM, event.at, but=SELF_ID)
    else:
        state, then = replace(state, why=Why.NODE_LEFT if state.why is Why.NODE_JOINED else state.why), ()
    return state, (announces, *then)


def _hand_over(state: State) -> Result:
    """Leave the job to the nodes that stay."""
    signum = state.members[SELF_ID].leaves_by
    ended = replace(state, phase=Phase.ENDED, status=exitcodes.of_signal(signum))
    return ended, (actions.HandOver(signum), actions.Release(SELF_ID, signum))


def _on_own_unfit(state: State, reason: str) -> Result:
    """Leave the job to the other nodes at once, since no worker has been started here; do nothing if they cannot go on."""
    if not _has_heirs(state) or _is_ending(state) or not _goes_on_without(state, SELF_ID):
        return state, ()
    return replace(state, phase=Phase.ENDED, status=exitcodes.NODE_LOST), (actions.HandOver(0, reason),)


def _leave_to_others(state: State, event: events.NodeStopping) -> Result:
    """Have another node take over, since the command that started this one is lost or was killed; end the job here.

    Others that have lost this one may be looking for it, and are to find nobody.
    """
    # its own workers may have ended with 0 while those of others hang
    why = Why.FRONT_LOST if state.why in (Why.HUNG, Why.TIMED_OUT) else state.why
    alone = replace(state, members=Members.of([state.members[event.id]]), electorates=(), gather_until=None, why=why)
    state, then = _on_node_stopping(alone, event)
    state, ended = go_on_if_ended(state, event.at)
    return state, (actions.HandOver(0), *then, *ended)


# --- time


def _on_deadline(state: State, at: float) -> Result:
    """Do what is due at this time: stop the job, start, end a rendezvous in vain, or print what the job waits for."""
    if state.deadline is None or at < state.deadline:
        return state, ()
    if state.job_deadline is not None and at >= state.job_deadline and state.has_time_limit:
        return _stop_job(state, Why.TIMED_OUT, SIGTERM, at)
    if state.gather_until is not None and at >= state.gather_until:
        return go_on_if_ended(replace(state, gather_until=None, notice_at=None), at)
    if state.phase_deadline is not None and at >= state.phase_deadline:
        if state.phase is Phase.RENDEZVOUS:  # no further node has joined in time
            return start(state, at)
        return start_if_enough(waiting(state, at), at, is_restart=True)
    if state.rdzv_deadline is not None and at >= state.rdzv_deadline:
        text = f"the rendezvous timed out: {rendezvous.joined(state)}; missing: {rendezvous.missing(state)}"
        if state.generation < 0:
            return end(replace(state, why=Why.NOT_MET), text)
        hint = "type the same command on another node in time, or allow fewer nodes, as `--nnodes MIN:MAX` does"
        return end(replace(state, why=Why.NODE_LOST), f"too few nodes are left, and {text}", hint)
    if state.phase is Phase.RENDEZVOUS or state.gather_until is not None:
        return replace(state, notice_at=at + NEXT_NOTICE), (actions.Print(rendezvous.waiting(state, at)),)
    finished = ", ".join(str(member) for member in state.taking_part if member.has_ended)
    line = f"{finished} finished a minute ago while the others run on: a collective that waits for it never ends"
    return replace(state, notice_at=None), (actions.Print(line),)
