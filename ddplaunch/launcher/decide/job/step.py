"""The decision about the job: a state and an event give the next state and the actions to carry out.

`step` is the table of events. How a generation ends, and what follows, is in `ending`; how the next one starts, in `starting`.
"""

from __future__ import annotations

from collections.abc import Sequence
from signal import SIGHUP, SIGINT, SIGTERM

from msgspec.structs import replace

from ddplaunch.launcher.decide.job import actions, events, limits, rendezvous
from ddplaunch.launcher.decide.job.ending import (
    NO_FAILURE,
    Result,
    end_job,
    ended_here,
    go_on_if_ended,
    halt,
    leave_job,
    stop_nodes,
)
from ddplaunch.launcher.decide.job.members import SELF_ID, Member, Members
from ddplaunch.launcher.decide.job.partition import on_left_behind_ended, on_partition_due, on_unheard, on_unreached
from ddplaunch.launcher.decide.job.starting import (
    IS_A_SPARE,
    on_rendezvous_due,
    on_withdrawn,
    start_generation,
    start_if_complete,
    start_if_enough,
    take_back_generation,
    wait_for_nodes,
    with_given_up,
)
from ddplaunch.launcher.decide.job.state import BETWEEN_GENERATIONS, Phase, State
from ddplaunch.spec.outcome import MAY_RESTART, OWN_END, Why, WorkerExit
from ddplaunch.system import exitcodes
from ddplaunch.system.loop.deadline import is_due
from ddplaunch.system.words import signal_name

_ENDED_THERE = "its workers were ended there, as when it is not heard for too long"
EARLY_EXIT_WARNING = 60.0  # seconds after which nodes that have finished are named while the others run on

# seconds from SIGTERM to a node until the next generation: somebody who deletes the whole job does not reach all nodes at
# once, and node 0, with which the job ends, may be the last
REGROUP = 2.0


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
        case events.AgentLost(id):
            return _on_agent_lost(state, event) if id in state.members else (state, ())
        case events.NodeGivenUp(node_rank, at):
            return start_if_complete(with_given_up(state, node_rank), at)
        case events.Withdrawn():
            return on_withdrawn(state, event)
        case events.OwnUnfit(reason):
            return _on_own_unfit(state, reason)
        # the generation
        case events.BeginFailed(failure):
            generation = replace(state.generation, start_failure=failure)
            return end_job(replace(state, why=Why.FAILED, generation=generation))
        case events.PortTaken(at):
            return take_back_generation(state, at), ()
        case events.NodeStopping(id, why, signum):
            return _on_node_stopping(_note_signal(state, signum, why), event) if id in state.members else (state, ())
        case events.NodeEnded(id):
            return _on_node_ended(state, event) if state.members.runs(id) else (state, ())
        case events.NodeIdle(id):
            return _on_node_idle(state, event) if state.members.runs(id) else (state, ())
        case events.LimitsPaused(id, paused):
            return _on_limits_paused(state, id, paused=paused) if state.members.runs(id) else (state, ())
        case events.Unreached() if state.phase is Phase.RUNNING:
            return on_unreached(state, event)
        case events.Unheard(id) if state.phase in (Phase.RUNNING, Phase.STOPPING) and state.members.runs(id):
            return on_unheard(state, event), ()
        case events.Unreached() | events.Unheard():
            return state, ()
        # the user, or a scheduler
        case events.NodeNoticed(id, signum):
            return (_note_signal(state, signum), ()) if state.members.runs(id) else (state, ())
        case events.NodeEscalated(id, signum):
            return _on_escalated(_note_signal(state, signum), id, signum)
        case events.StopRequested(why, signum, at, by_cluster):
            return _stop_job(_note_signal(state, signum, why), why, signum, at, by_cluster=by_cluster)
        case events.Abandoned():
            return _abandon(state), ()
        case events.JobSuspended(at):
            return replace(state, limits=state.limits.suspended(at)), ()
        case events.JobResumed(at):
            return _on_resumed(state, at), ()
        # time
        case events.DeadlineReached(at, is_first_silent):
            return _on_deadline(state, at, is_first_silent=is_first_silent)


def _note_signal(state: State, signum: int, why: Why = Why.SIGNALLED) -> State:
    """Remember that a notice announced the end of the job, or that the user stopped it by another signal than SIGTERM."""
    if why is not Why.SIGNALLED:
        return state
    if signum in state.policy.notices:
        generation = state.generation
        return state if generation.notice else replace(state, generation=replace(generation, notice=signum))
    return _abandon(state) if signum not in (0, SIGTERM) else state


def _abandon(state: State) -> State:
    """Remember that the user has stopped the job, which is not queued again."""
    return replace(state, end=replace(state.end, abandoned=True))


# --- members


def _on_joined(state: State, member: Member, at: float) -> Result:
    """Refuse an agent that cannot take part; else start if enough agents have joined, or start again with the late agent."""
    policy, members = state.policy, state.members
    if (reason := rendezvous.why_refused(policy, members, member)) is not None:
        hint = rendezvous.hint_to_refused(policy, members, member)
        return state, (actions.Refuse(member.id, reason, exitcodes.USAGE, hint),)
    state = replace(state, members=members.with_member(member))
    if state.phase is Phase.RENDEZVOUS:
        return start_if_enough(state, at, is_restart=state.generation.number >= 0)
    if state.spares:
        return state, (actions.Print(IS_A_SPARE.format(member.host)),)
    if state.phase is Phase.RUNNING and not any(other.has_ended for other in state.members.values()):
        state, then = stop_nodes(state, Why.NODE_JOINED, SIGTERM, at)
        return state, (actions.Print(f"{member.host} joins: all workers start again with it"), *then)
    return state, ()


def _wait_for_lease(state: State, lost: events.AgentLost) -> State:
    """Begin no generation until the lease of a lost node is over, unless its workers are known to have ended: they may live."""
    if not state.policy.lease or lost.has_ended or not state.members.runs(lost.id):
        return state
    renewed_at = lost.at if lost.renewed_at is None else lost.renewed_at
    return replace(state, rendezvous=state.rendezvous.not_before(renewed_at + state.policy.lease))


def _on_agent_lost(state: State, lost: events.AgentLost) -> Result:
    """Go on without this agent, if the job can: start with the other agents, or stop what runs and decide then."""
    member, reason, at = state.members[lost.id], lost.reason, lost.at
    state = _wait_for_lease(state, lost)
    state = replace(state, members=state.members.without(lost.id))
    if state.phase in BETWEEN_GENERATIONS and _lacks_a_node(state):
        # between generations it has no node rank: the report names it by the rank that its user gave it
        named = member if member.requested_rank is None else replace(member, node_rank=member.requested_rank)
        generation = replace(state.generation, lost=(f"{named}: {reason}",))
        return end_job(replace(state, why=Why.NODE_LOST, generation=generation))
    if state.phase is Phase.RENDEZVOUS:
        state, then = start_if_enough(state, at, is_restart=state.generation.number >= 0)
        return state, (actions.Print(f"{member.host} has left: {reason}"), *then)
    if not member.runs:
        state, then = go_on_if_ended(state, at)
        was_spare = state.policy.spares and member.node_rank is None
        how = "has left" if reason == OWN_END else f"is lost: {reason}"
        return state, (actions.Print(f"{member.host}, a spare, {how}"), *then) if was_spare else then
    state = replace(state, has_begun=True)  # perhaps: it has not reported whether it had started workers
    if member.is_leaving:  # how its workers have ended is not known
        unknown = replace(state.generation, node_exits=state.generation.node_exits.with_item(lost.id, ()))
        return go_on_if_ended(replace(state, generation=unknown), at)
    state = replace(state, generation=state.generation.with_lost(f"{member}: {reason}"))
    if state.phase is Phase.RUNNING:
        state, then = stop_nodes(state, Why.NODE_LOST, SIGTERM, at)
    else:
        why = Why.NODE_LOST if state.why in NO_FAILURE else state.why
        state, then = go_on_if_ended(replace(state, why=why), at)
    return state, (actions.Print(f"{member} is lost: {reason}"), *then)


def _lacks_a_node(state: State) -> bool:
    """Whether a job between two generations cannot go on without the node that was lost, since none comes in its place."""
    policy = state.policy
    has_too_few = state.generation.number >= 0 and len(state.members) < policy.min_nodes
    return policy.needs_all or (has_too_few and not policy.nodes_are_replaceable)


# --- the end of a generation


def _on_node_stopping(state: State, event: events.NodeStopping) -> Result:
    """Stop all other nodes too, unless the job goes on without this node."""
    id, why, signum, at = event.id, event.why, event.signum, event.at
    if state.members[id].is_leaving and _leaves_job(state, event):
        return state, ()  # it is leaving already
    if id != SELF_ID:
        # one command has started all agents: a signal to one is for the job
        takes_no_part = state.members[id].node_rank is None and not state.policy.needs_all
        concerns_it_alone = takes_no_part and not state.policy.dispatched
        if why is Why.FRONT_LOST or concerns_it_alone:
            state, then = _on_agent_lost(state, events.AgentLost(id, OWN_END, at))
            # an agent that takes no part yet may come back with other options; one that has lost its front will not
            return state, (*then, actions.Drop(id) if why is Why.FRONT_LOST else actions.Release(id, signum))
        if _leaves_job(state, event):
            return _on_node_leaving(state, event)
    elif _is_waited_for(state) and _leaves_job(state, event):
        return _on_node_0_leaving(state, event)
    elif why is Why.FRONT_LOST and _is_waited_for(state):
        return _leave_to_others(state, event)
    if state.phase is Phase.RUNNING:
        return stop_nodes(state, why, signum or SIGTERM, at, but=id, by_cluster=event.by_cluster)
    if state.phase in BETWEEN_GENERATIONS:
        return end_job(replace(state, why=why, signum=signum))
    if state.why is Why.NODE_JOINED or (why is not Why.FAILED and _was_to_go_on(state)):
        state = replace(state, why=why, signum=signum)  # the workers were being stopped for nothing worse
    return state if why is Why.FAILED else halt(state), ()  # after a failure all may start again


def _on_escalated(state: State, id: int, signum: int) -> Result:
    """Kill everywhere and end the job; a second SIGTERM to a node that leaves ends no job, and only node 0 waits for others."""
    member = state.members.get(id)
    others = tuple(other for other in state.members.running if other != id)
    kills = (actions.KillNodes(others),) if others else ()
    if member is not None and member.is_leaving:
        if signum == SIGTERM:
            return state, kills if id == SELF_ID else ()
        state = replace(state, why=Why.SIGNALLED, signum=signum)
    return halt(state), kills


def _stop_job(state: State, why: Why, signum: int, at: float, *, by_cluster: bool = False) -> Result:
    """Stop all nodes, and start nothing after it; end the job at once where no generation runs."""
    if state.phase is Phase.RUNNING:
        return stop_nodes(state, why, signum or SIGTERM, at, by_cluster=by_cluster)
    if state.phase in BETWEEN_GENERATIONS:
        return end_job(replace(state, why=why, signum=signum))
    if _was_to_go_on(state):
        state = replace(state, why=why, signum=signum)
    return halt(state), ()


def _was_to_go_on(state: State) -> bool:
    """Whether the workers are being stopped for what ends no job: nodes came or left, or were lost while enough remain."""
    policy = state.policy
    is_enough = policy.is_elastic and len(state.members) >= policy.min_nodes
    return state.why in NO_FAILURE or (state.why is Why.NODE_LOST and is_enough)


def _on_node_ended(state: State, event: events.NodeEnded) -> Result:
    """Note how the workers of this node ended; after the last node, decide what follows."""
    member, generation = state.members[event.id], state.generation
    generation = replace(generation, node_exits=generation.node_exits.with_item(event.id, event.exits))
    has_begun = state.has_begun or bool(event.exits or event.leftovers)
    state = replace(state, generation=generation, has_begun=has_begun)
    if member.is_leaving and event.id != SELF_ID:
        state = replace(state, members=state.members.without(event.id))
        state, then = go_on_if_ended(state, event.at)
        return state, (actions.Release(event.id, member.leave_signal), *then)
    generation = replace(
        generation,
        start_failure=generation.start_failure or event.start_failure,
        leftovers=(*generation.leftovers, *event.leftovers),
    )
    state = replace(state, generation=generation, members=state.members.with_member(replace(member, has_ended=True)))
    if event.leftovers:
        state = halt(state)  # the next generation would run beside these processes
    if member.left_behind:
        return on_left_behind_ended(state, member, event.at)
    if state.phase is Phase.RUNNING and not _have_finished(member, event.exits):
        # as at the end of its lease: its agent has stopped them, and lives without this coordinator
        state = replace(state, generation=generation.with_lost(f"{member}: {_ENDED_THERE}"))
        state, then = stop_nodes(state, Why.NODE_LOST, SIGTERM, event.at)
        return state, (actions.Print(f"{member} is lost: {_ENDED_THERE}"), *then)
    is_first_after_ctrl_c = state.phase is Phase.STOPPING and state.signum == SIGINT and len(generation.node_exits) == 1
    if is_first_after_ctrl_c and not state.members.have_ended:
        # on the other nodes a worker may wait in C for one of these, and only SIGKILL ends it
        return state, (actions.StopNodes(state.members.running, SIGINT, others_ended=True),)
    if state.phase is Phase.RUNNING and generation.early_exits_at is None:
        generation = replace(generation, early_exits_at=event.at + EARLY_EXIT_WARNING)
    return go_on_if_ended(replace(state, generation=generation), event.at)


def _have_finished(member: Member, exits: Sequence[WorkerExit]) -> bool:
    """Whether all workers of a node were started, and have ended well: a failure is reported before."""
    return len(exits) == member.workers and all(end.status == 0 for end in exits)


# --- a node that leaves: SIGTERM came to one agent of an elastic job, as before a pod or spot machine is taken, or SIGHUP, since
# --- its terminal was closed


def _leaves_job(state: State, event: events.NodeStopping) -> bool:
    """Whether this node leaves a job that goes on without it, or waits for another in its place; else the job ends."""
    policy = state.policy
    asks_to_leave = event.why is Why.SIGNALLED and event.signum in (SIGTERM, SIGHUP) and not event.by_cluster
    nodes_may_leave = policy.nodes_may_leave and policy.min_nodes < policy.max_nodes and SIGTERM not in policy.notices
    return asks_to_leave and nodes_may_leave and not _is_ending(state) and _goes_on_without(state, event.id)


def _goes_on_without(state: State, id: int) -> bool:
    return state.policy.nodes_are_replaceable or _number_staying(state, id) >= state.policy.min_nodes


def _is_ending(state: State) -> bool:
    """Whether no generation follows the one that is being stopped."""
    return state.phase is Phase.STOPPING and (state.end.no_restart or state.why not in MAY_RESTART)


def _number_staying(state: State, id: int) -> int:
    """Return how many members stay when this one leaves."""
    return sum(member.id != id and not member.is_leaving for member in state.members.values())


def _on_node_leaving(state: State, event: events.NodeStopping) -> Result:
    """Go on without this node: its agent ends once the generation has ended there, and all other nodes start again."""
    id, at, member = event.id, event.at, state.members[event.id]
    lacking = state.policy.min_nodes - _number_staying(state, id)
    when = f"once {lacking} more {'has' if lacking == 1 else 'have'} joined" if lacking > 0 else "without it"
    line = actions.Print(f"{member} leaves ({signal_name(event.signum)}): all workers start again {when}")
    members = state.members.with_member(replace(member, leave_signal=event.signum))
    state = replace(state, members=members, rendezvous=state.rendezvous.not_before(at + REGROUP))
    if not member.runs:
        starts_again = state.phase in (Phase.STOPPING, Phase.PAUSING)
        state, then = _on_agent_lost(state, events.AgentLost(id, OWN_END, at))
        return state, (*((line,) if starts_again else ()), *then, actions.Release(id, event.signum))
    if state.phase is Phase.RUNNING:
        state, then = stop_nodes(state, Why.NODE_LEFT, SIGTERM, at, but=id)
        return state, (line, *then)
    return replace(state, why=Why.NODE_LEFT if state.why is Why.NODE_JOINED else state.why), (line,)


def _is_waited_for(state: State) -> bool:
    """Whether the other nodes wait for node 0 to be started again, should it end."""
    policy = state.policy
    return policy.is_elastic and policy.nodes_are_replaceable and len(state.members) > 1


def _on_node_0_leaving(state: State, event: events.NodeStopping) -> Result:
    """Have the other nodes wait for node 0, once the workers have ended everywhere: all have the time to save something."""
    own = replace(state.members[SELF_ID], leave_signal=event.signum)
    how = f"{own} leaves ({signal_name(event.signum)}): the others wait until node 0 is started again"
    state = replace(state, members=state.members.with_member(own))
    if state.phase in BETWEEN_GENERATIONS:
        state, then = leave_job(state, event.signum)
    elif state.phase is Phase.RUNNING:
        state, then = stop_nodes(state, Why.NODE_LEFT, SIGTERM, event.at, but=SELF_ID)
    else:
        state, then = replace(state, why=Why.NODE_LEFT if state.why is Why.NODE_JOINED else state.why), ()
    return state, (actions.Print(how), *then)


def _on_own_unfit(state: State, reason: str) -> Result:
    """Leave the job to the other nodes if these wait for node 0, on which no worker has been started; else do nothing."""
    if not _is_waited_for(state) or _is_ending(state):
        return state, ()
    return ended_here(state, exitcodes.NODE_LOST), (actions.LeaveJob(0, reason),)


def _leave_to_others(state: State, event: events.NodeStopping) -> Result:
    """Have the others wait for node 0, since the command that started this one is lost or was killed; end the job here.

    If the others heard of that before the workers here have ended, another node 0 might begin a generation beside these.
    """
    if state.members[SELF_ID].runs and not _is_ending(state):
        return _on_node_0_leaving(replace(state, end=replace(state.end, cut_off=True)), event)
    # its own workers may have ended with 0 while those of others hang
    why = Why.FRONT_LOST if state.why in (Why.HUNG, Why.TIMED_OUT) else state.why
    alone = replace(state, members=Members.of([state.members[event.id]]), why=why)  # as the job of this node alone
    state, then = _on_node_stopping(alone, event)
    state, ended = go_on_if_ended(state, event.at)
    return state, (actions.LeaveJob(0), *then, *ended)


# --- time


def _on_node_idle(state: State, event: events.NodeIdle) -> Result:
    """Note for how long a node has made no progress. If no node has for too long, stop all workers, or print it."""
    if state.phase is not Phase.RUNNING or state.limits.suspended_at is not None or state.is_debugged:
        return state, ()
    before, limit = state.idleness, state.policy.hang_timeout or limits.IDLE_LINE_AFTER
    idleness, idle_for = before.after_report(event.id, event.since, event.at, state.members, limit)
    if idle_for is None:
        moves_again = before.is_printed and not idleness.is_printed
        then = (actions.PrintProgress(event.at - idleness.printed_at),) if moves_again else ()
        return replace(state, idleness=idleness), then
    if state.policy.hang_timeout is not None:
        return stop_nodes(replace(state, idleness=idleness), Why.HUNG, SIGTERM, event.at)
    return replace(state, idleness=replace(idleness, printed_at=event.at)), (actions.PrintIdle(idle_for),)


def _on_limits_paused(state: State, id: int, *, paused: bool) -> Result:
    """Have the time limits wait while a debugger holds a worker of this node; print so once for each node but node 0."""
    before, line = state.limits, limits.line_on_debugger(state.policy, state.members[id])
    if not paused:
        return replace(state, limits=replace(before, debugging=before.debugging - {id})), ()
    # the user of node 0 sees the debugger
    needs_no_line = id == SELF_ID or id in before.named_as_debugging or not line
    return replace(state, limits=before.with_debugger(id)), () if needs_no_line else (actions.Print(line),)


def _on_resumed(state: State, at: float) -> State:
    """Move the deadlines by the time that the job was suspended. The rendezvous has not waited meanwhile."""
    suspended_at, deadline = state.limits.suspended_at, state.phase_deadline
    if suspended_at is not None and deadline is not None and state.phase is not Phase.RENDEZVOUS:
        deadline += at - suspended_at
    return replace(state, limits=state.limits.resumed(at), phase_deadline=deadline)


def _on_deadline(state: State, at: float, *, is_first_silent: bool) -> Result:
    """Do what is due at this time: stop the job, start, end a rendezvous in vain, or print what the job waits for."""
    if not is_due(state.deadline, at):
        return state, ()
    if is_due(state.limits.job_deadline, at) and state.has_time_limit:
        return _stop_job(state, Why.TIMED_OUT, SIGTERM, at)
    if is_due(state.phase_deadline, at):
        if state.phase is Phase.RENDEZVOUS:  # no further node has joined in time
            return start_generation(state, at)
        return start_if_enough(wait_for_nodes(state, at), at, is_restart=True)
    if state.phase is Phase.RENDEZVOUS:
        return on_rendezvous_due(state, at)
    if state.phase is Phase.RUNNING and is_due(state.partition.due, at):
        return on_partition_due(state, at, is_first_silent=is_first_silent)
    return _on_early_exits_due(state)


def _on_early_exits_due(state: State) -> Result:
    """Print which nodes have finished while the workers of others run on."""
    finished = ", ".join(str(member) for member in state.members.taking_part if member.has_ended)
    line = f"{finished} finished a minute ago while the others run on: a collective that waits for it never ends"
    return replace(state, generation=replace(state.generation, early_exits_at=None)), (actions.Print(line),)
