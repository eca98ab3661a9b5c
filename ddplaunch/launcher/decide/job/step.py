"""What the coordinator decides about the job: a state and an event give the next state and the actions to carry out. Pure.

`step` is the table of events. What the loss of a node means is in `node_loss`; how a generation ends, and what follows, in
`ending`; how the next one starts, in `starting`.
"""

from __future__ import annotations

from signal import SIGINT, SIGTERM

from msgspec.structs import replace

from ddplaunch.launcher.decide.job import actions, events, limits, rendezvous
from ddplaunch.launcher.decide.job.ending import (
    NO_FAILURE,
    Result,
    end_job,
    go_on_if_ended,
    stop_nodes,
    with_no_restart,
)
from ddplaunch.launcher.decide.job.members import SELF_ID, Member, Members
from ddplaunch.launcher.decide.job.node_loss import (
    is_ending,
    leaves_job,
    on_agent_lost,
    on_first_node_unheard,
    on_first_node_unreached,
    on_left_behind_ended,
    on_node_0_leaving,
    on_node_leaving,
    on_own_unfit,
    on_partition_due,
    others_would_wait,
)
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
from ddplaunch.spec.outcome import ENDED_ITSELF, Why
from ddplaunch.system import exitcodes
from ddplaunch.system.process.clock import is_due

_WORKERS_ENDED_THERE = "its workers were ended there, as when it is not heard for too long"
EARLY_EXIT_WARNING = 60.0  # seconds after which nodes that have finished are named while the others run on


def step(state: State, event: events.Event) -> Result:
    """Return the state after `event`, and the actions to carry out.

    Reports of nodes that are no members any more, or on which nothing of the generation is left, are dropped.
    """
    if state.phase is Phase.ENDED:
        if isinstance(event, events.Joined):
            return state, (actions.Refuse(event.member.id, "the job has ended", exitcodes.RENDEZVOUS),)
        return state, ()
    match event:
        # members
        case events.Joined(member, at):
            return _on_joined(state, member, at)
        case events.AgentLost(id):
            return on_agent_lost(state, event) if id in state.members else (state, ())
        case events.NodeGivenUp(node_rank, at):
            return start_if_complete(with_given_up(state, node_rank), at)
        case events.Withdrawn():
            return on_withdrawn(state, event)
        case events.OwnUnfit(reason):
            return on_own_unfit(state, reason)
        case events.ProgressKnown(best_step, without_new_step):
            return replace(state, restarts=state.restarts.after_earlier(best_step, without_new_step)), ()
        # the generation
        case events.BeginFailed(failure):
            generation = replace(state.generation, start_failure=failure)
            return end_job(replace(state, why=Why.FAILED, generation=generation))
        case events.PortTaken(at):
            return take_back_generation(state, at), ()
        case events.NodeStopping(id, why, signum):
            return _on_node_stopping(_note_signal(state, signum, why), event) if id in state.members else (state, ())
        case events.NodeEnded(id) | events.NodeIdle(id) | events.NodeStacksRead(id) | events.LimitsPaused(id):
            return _on_report(state, event) if state.members.runs(id) else (state, ())
        case events.FirstNodeUnreached() if state.phase is Phase.RUNNING:
            return on_first_node_unreached(state, event)
        case events.FirstNodeUnheard(id) if state.phase in (Phase.RUNNING, Phase.STOPPING) and state.members.runs(id):
            return on_first_node_unheard(state, event), ()
        case events.FirstNodeUnreached() | events.FirstNodeUnheard():  # nothing of the generation runs there any more
            return state, ()
        # the user, or a scheduler
        case events.NodeNoticed(id, signum):
            return (_note_signal(state, signum), ()) if state.members.runs(id) else (state, ())
        case events.NodeEscalated(id, signum):
            return _on_escalated(_note_signal(state, signum), id, signum)
        case events.StopRequested(why, signum, at, by_cluster):
            return _stop_job(_note_signal(state, signum, why), why, signum, at, by_cluster=by_cluster)
        case events.Abandoned():  # the user stops the job for good
            return _not_to_be_queued_again(state), ()
        case events.JobSuspended(at):
            return replace(state, limits=state.limits.suspended(at)), ()
        case events.JobResumed(at):
            return _on_resumed(state, at), ()
        # time
        case events.DeadlineReached(at, is_first_silent):
            return _on_deadline(state, at, is_first_silent=is_first_silent)


def _on_report(state: State, event: events.Report) -> Result:
    """Take what a node reports on which processes of the generation are left."""
    match event:
        case events.NodeEnded():
            return _on_node_ended(state, event)
        case events.NodeIdle():
            return _on_node_idle(state, event)
        case events.NodeStacksRead():
            return _on_node_stacks_read(state)
        case events.LimitsPaused(id, paused):
            return _on_limits_paused(state, id, paused=paused)


def _note_signal(state: State, signum: int, why: Why = Why.SIGNALLED) -> State:
    """Remember that a notice announced the end of the job, or that the user stopped it by another signal than SIGTERM."""
    if why is not Why.SIGNALLED:
        return state
    if signum in state.policy.notices:
        generation = state.generation
        return state if generation.notice else replace(state, generation=replace(generation, notice=signum))
    # SIGTERM is what schedulers send too, and 0 is no signal
    return _not_to_be_queued_again(state) if signum not in (0, SIGTERM) else state


def _not_to_be_queued_again(state: State) -> State:
    """Remember that the user has stopped the job (abandoned it), which is not queued again."""
    return replace(state, end=replace(state.end, abandoned=True))


# --- members


def _on_joined(state: State, member: Member, at: float) -> Result:
    """Refuse an agent that cannot take part; else start if enough agents have joined, or start again with the late agent.

    The late agent waits for the next generation if the job has its nodes, the workers of a node have finished, or all are being
    stopped.
    """
    policy, members = state.policy, state.members
    if (reason := rendezvous.why_refused(policy, members, member)) is not None:
        hint = rendezvous.hint_to_refused(policy, members, member)
        return state, (actions.Refuse(member.id, reason, exitcodes.USAGE, hint),)
    state = replace(state, members=members.with_member(member))
    if state.phase is Phase.RENDEZVOUS:
        return start_if_enough(state, at, is_restart=not state.generation.is_before_first)
    if state.spares:  # more nodes are here than a generation has
        return state, (actions.Print(IS_A_SPARE.format(member.host)),)
    has_finished_anywhere = any(other.has_ended for other in state.members.values())
    if state.phase is Phase.RUNNING and not has_finished_anywhere:
        state, then = stop_nodes(state, Why.NODE_JOINED, SIGTERM, at)
        return state, (actions.Print(f"{member.host} joins: all workers start again with it"), *then)
    return state, ()


# --- the end of a generation


def _on_node_stopping(state: State, event: events.NodeStopping) -> Result:
    """Decide what it means that a node stops its workers: all other nodes stop too, unless the job goes on without this one.

    A node stops by itself after a failure, by a signal, or when its front (the command that its user typed) has ended.
    `leaves_job`: asked by its signal, it leaves, and the job goes on. `others_would_wait`: if node 0 ends, for it to come again.
    """
    id, member, front_is_lost = event.id, state.members[event.id], event.why is Why.FRONT_LOST
    leaves = leaves_job(state, event)
    if member.is_leaving and leaves:
        return state, ()  # it is leaving already
    if id == SELF_ID:
        if others_would_wait(state) and leaves:
            return on_node_0_leaving(state, event)
        if others_would_wait(state) and front_is_lost:
            return _leave_to_others(state, event)
        return _stop_all_nodes(state, event)
    # where one command has started all agents, a signal to one of them is for the job
    concerns_it_alone = member.node_rank is None and not state.policy.needs_all and not state.policy.has_one_command
    if front_is_lost or concerns_it_alone:
        state, then = on_agent_lost(state, events.AgentLost(id, ENDED_ITSELF, event.at))
        # an agent that takes no part yet is told to end by its signal; to one that has lost its front nothing is said
        return state, (*then, actions.Drop(id) if front_is_lost else actions.Release(id, event.signum))
    if leaves:
        return on_node_leaving(state, event)
    return _stop_all_nodes(state, event)


def _stop_all_nodes(state: State, event: events.NodeStopping) -> Result:
    """Stop all nodes as this one has; where no worker runs, end the job; during a stop, see that no generation follows it."""
    why, is_failure = event.why, event.why is Why.FAILED
    signum = event.signum  # 0: the reason is no signal
    if state.phase is Phase.RUNNING:
        return stop_nodes(state, why, signum or SIGTERM, event.at, but=event.id, by_cluster=event.by_cluster)
    if state.phase in BETWEEN_GENERATIONS:
        return end_job(replace(state, why=why, signum=signum))
    if state.why is Why.NODE_JOINED or (_was_to_start_again(state) and not is_failure):
        # the worse reason of the two; but a failure may only follow from the node that is lost or leaves
        state = replace(state, why=why, signum=signum)
    return (state if is_failure else with_no_restart(state)), ()  # after a failure another generation may follow


def _leave_to_others(state: State, event: events.NodeStopping) -> Result:
    """Have the others wait for node 0, since the command that started this one is lost or was killed; end the job here.

    If the others heard of that before the workers here have ended, another node 0 might begin a generation beside these.
    """
    if state.members[SELF_ID].runs and not is_ending(state):  # all workers are stopped first
        return on_node_0_leaving(replace(state, end=replace(state.end, front_of_node_0_is_lost=True)), event)
    # a hang, or the end of the time, is for the others to report: the workers here may have ended with 0
    why = Why.FRONT_LOST if state.why in (Why.HUNG, Why.TIMED_OUT) else state.why
    # `LeaveJob` has the others wait; node 0 decides as if it were the only node, so that its own job ends
    alone = replace(state, members=Members.of([state.members[event.id]]), why=why)
    state, then = _on_node_stopping(alone, event)
    state, ended = go_on_if_ended(state, event.at)
    return state, (actions.LeaveJob(signum=0), *then, *ended)  # 0: no signal came


def _on_escalated(state: State, id: int, signum: int) -> Result:
    """Kill the workers of all other nodes, as this one has killed its own, and end the job: a second signal came to this node.

    A second SIGTERM to a node that leaves does not end the job. If that is node 0, the others are killed, for it waits for them.
    """
    member = state.members.get(id)
    others = tuple(other for other in state.members.running if other != id)
    kills = (actions.KillNodes(others),) if others else ()
    if member is not None and member.is_leaving:
        if signum == SIGTERM:
            return state, kills if id == SELF_ID else ()
        state = replace(state, why=Why.SIGNALLED, signum=signum)
    return with_no_restart(state), kills


def _stop_job(state: State, why: Why, signum: int, at: float, *, by_cluster: bool = False) -> Result:
    """Stop all nodes, and start nothing after it; end the job at once where no generation runs."""
    if state.phase is Phase.RUNNING:
        return stop_nodes(state, why, signum or SIGTERM, at, by_cluster=by_cluster)
    if state.phase in BETWEEN_GENERATIONS:
        return end_job(replace(state, why=why, signum=signum))
    if _was_to_start_again(state):
        state = replace(state, why=why, signum=signum)
    return with_no_restart(state), ()


def _was_to_start_again(state: State) -> bool:
    """Whether the workers are being stopped for what ends no job: nodes came or left, or were lost while enough remain."""
    policy = state.policy
    is_enough = policy.is_elastic and len(state.members) >= policy.min_nodes
    return state.why in NO_FAILURE or (state.why is Why.NODE_LOST and is_enough)


def _on_node_ended(state: State, event: events.NodeEnded) -> Result:
    """Note how the workers of this node ended; after the last node, decide what follows (`go_on_if_ended`)."""
    member, generation = state.members[event.id], state.generation
    generation = replace(generation, node_exits=generation.node_exits.with_item(event.id, event.exits))
    may_have_begun = state.workers_may_have_begun or bool(event.exits or event.leftovers)
    state = replace(state, generation=generation, workers_may_have_begun=may_have_begun)
    if member.is_leaving and event.id != SELF_ID:  # node 0 leaves after all others have ended: `go_on_if_ended`
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
        state = with_no_restart(state)  # the next generation would run beside these processes
    if member.why_left_behind:  # in the smaller part of a partition: the job goes on without it
        return on_left_behind_ended(state, member, event.at)
    if state.phase is Phase.RUNNING:
        return _on_node_ended_unstopped(state, member, event)
    was_ctrl_c = state.phase is Phase.STOPPING and state.signum == SIGINT
    is_first_to_end = len(generation.node_exits) == 1
    if was_ctrl_c and is_first_to_end and not state.members.all_have_ended:
        # on the other nodes a worker may wait in C for one of these, and only SIGKILL ends it
        return state, (actions.StopNodes(state.members.running, SIGINT, another_node_ended=True),)
    return go_on_if_ended(state, event.at)


def _on_node_ended_unstopped(state: State, member: Member, event: events.NodeEnded) -> Result:
    """Decide whether a node has finished or is lost: all of its workers have ended, and nobody has stopped the job.

    If all its workers have ended with status 0, the other nodes run on, and a line names the node after a minute. Else its agent
    has stopped the workers by itself, as at the end of its lease. (A failure of a worker is reported before, by `NodeStopping`.)
    """
    has_finished = len(event.exits) == member.workers and all(end.status == 0 for end in event.exits)
    if not has_finished:
        state = replace(state, generation=state.generation.with_lost(f"{member}: {_WORKERS_ENDED_THERE}"))
        state, then = stop_nodes(state, Why.NODE_LOST, SIGTERM, event.at)
        return state, (actions.Print(f"{member} is lost: {_WORKERS_ENDED_THERE}"), *then)
    if state.generation.early_exits_line_at is None:
        generation = replace(state.generation, early_exits_line_at=event.at + EARLY_EXIT_WARNING)
        state = replace(state, generation=generation)
    return go_on_if_ended(state, event.at)


def _on_node_stacks_read(state: State) -> Result:
    """Count a node that has read its workers' stacks before a stop; after the last one, let all nodes stop their workers.

    If a node were stopped earlier, workers of a slow node would lose contact before their stacks are read. A node that never
    reports holds nobody up for long: each waits for two seconds at most.
    """
    unread = state.generation.nodes_with_unread_stacks
    state = replace(state, generation=replace(state.generation, nodes_with_unread_stacks=max(0, unread - 1)))
    return state, (actions.TellAllStacksRead(state.members.running),) if unread == 1 else ()


# --- time


def _on_node_idle(state: State, event: events.NodeIdle) -> Result:
    """Note for how long a node has made no progress. If no node has for too long, stop all workers, or print a line."""
    limits_wait = state.limits.suspended_at is not None or state.is_debugged  # for Ctrl-Z, or for a debugger
    if state.phase is not Phase.RUNNING or limits_wait:
        return state, ()
    before, limit = state.idleness, state.policy.hang_timeout or limits.IDLE_LINE_AFTER
    idleness, all_idle_for = before.after_report(event.id, event.since, event.at, state.members, limit)
    if all_idle_for is None:  # too short, not known, or the user has read the line
        moves_again = before.is_printed_since_progress and not idleness.is_printed_since_progress
        since_the_line = event.at - idleness.printed_at
        return replace(state, idleness=idleness), (actions.PrintProgress(since_the_line),) if moves_again else ()
    if state.policy.hang_timeout is not None:
        return stop_nodes(replace(state, idleness=idleness), Why.HUNG, SIGTERM, event.at)
    return replace(state, idleness=replace(idleness, printed_at=event.at)), (actions.PrintIdle(all_idle_for),)


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
    """Do what is due: stop the job, start, end a rendezvous in vain, print what the job waits for, or who has finished.

    `is_first_silent`: node 0 does not answer the coordinator, which matters in a partition alone.
    """
    if not is_due(state.deadline, at):
        return state, ()
    if is_due(state.limits.job_deadline, at) and state.has_time_limit:
        return _stop_job(state, Why.TIMED_OUT, SIGTERM, at)
    if is_due(state.phase_deadline, at):
        if state.phase is Phase.RENDEZVOUS:  # enough nodes are here, and no further one has joined in time
            return start_generation(state, at)
        # the pause between two generations is over
        return start_if_enough(wait_for_nodes(state, at), at, is_restart=True)
    if state.phase is Phase.RENDEZVOUS:
        return on_rendezvous_due(state, at)
    if state.phase is Phase.RUNNING and is_due(state.partition.due, at):
        return on_partition_due(state, at, is_first_silent=is_first_silent)
    return _print_early_exits(state)  # nodes have finished a minute ago while others run


def _print_early_exits(state: State) -> Result:
    """Print which nodes have finished while the workers of others run on."""
    finished = ", ".join(str(member) for member in state.members.taking_part if member.has_ended)
    line = f"{finished} finished a minute ago while the others run on: a collective that waits for it never ends"
    return replace(state, generation=replace(state.generation, early_exits_line_at=None)), (actions.Print(line),)
