"""How a generation (one start of all workers) ends, and what follows: another one, or the job's end and status. Pure."""

from __future__ import annotations

from signal import SIGKILL

from msgspec.structs import replace

from ddplaunch.launcher.decide.first_failure import all_exited_after, failure_status, follows_another
from ddplaunch.launcher.decide.job import actions
from ddplaunch.launcher.decide.job.members import SELF_ID
from ddplaunch.launcher.decide.job.restarts import pause_after
from ddplaunch.launcher.decide.job.state import BETWEEN_GENERATIONS, Phase, State
from ddplaunch.spec.outcome import MAY_RESTART, STOPS_ALL_NODES, Why
from ddplaunch.system import exitcodes

Result = tuple[State, tuple[actions.Action, ...]]

NO_FAILURE = (Why.NODE_LEFT, Why.NODE_JOINED)  # reasons of a restart that are no failure: the stop itself was printed


def stop_nodes(
    state: State, why: Why, signum: int, at: float, *, but: int | None = None, by_cluster: bool = False
) -> Result:
    """Order all nodes to stop their workers, except for the node `but`, which does so already; None: all.

    That node, too, is told if the job hangs, which one node alone cannot know.
    What follows is decided when no process is left on any node: another generation, or the end of the job.
    """
    running = state.members.running
    job_stands_still = why is Why.HUNG or state.idleness.stands_still(running, at)
    ids = tuple(id for id in running if id != but or job_stands_still)
    # such a stop waits until all nodes have read the stacks of their workers
    generation = replace(state.generation, nodes_with_unread_stacks=len(ids) if why in STOPS_ALL_NODES else 0)
    state = replace(state, generation=generation)
    state, then = go_on_if_ended(replace(state, phase=Phase.STOPPING, why=why, signum=signum), at)
    return state, (
        actions.StopNodes(ids, signum, by_cluster, job_stands_still=job_stands_still),
        *then,
    ) if ids else then


def with_no_restart(state: State) -> State:
    """Return the state after which no generation begins: the job ends once the workers have."""
    return replace(state, end=replace(state.end, no_restart=True))


def go_on_if_ended(state: State, at: float) -> Result:
    """Decide what follows once no process of the generation is left on any node; until then, nothing does."""
    if not state.members.all_have_ended:
        return state, ()
    if state.phase is Phase.RUNNING:  # nobody has stopped the workers
        return _end_after_exits(replace(state, why=Why.FINISHED))
    if state.phase is not Phase.STOPPING:  # no generation runs
        return state, ()
    generation = state.generation
    stop_came_from_no_worker = state.why in (Why.TIMED_OUT, Why.HUNG, *NO_FAILURE) and not generation.lost
    if stop_came_from_no_worker and _no_worker_was_asked_to_end(state):
        # the reason to stop came when all workers had ended, while processes that they left behind were being swept
        return end_job(replace(state, why=Why.FAILED if generation.failure else Why.FINISHED))
    return _restart_or_end(state, at)


def _no_worker_was_asked_to_end(state: State) -> bool:
    """Whether all workers of all nodes were started, and none was asked to end, also on nodes that have left."""
    node_exits, taking_part = state.generation.node_exits, state.members.taking_part
    none_is_unknown = all(node_exits.values())  # () is of a node that was lost while it left
    have_started = all(len(node_exits.get(member.id, ())) == member.workers for member in taking_part)
    return none_is_unknown and have_started and all(end.stopped_with is None for end in state.generation.exits)


def _restart_or_end(state: State, at: float) -> Result:
    """Start another generation where that is allowed and may help; else end the job. No process is left on any node."""
    if _notice_obeyed(state):  # the end of the job was announced, and all workers have saved and exited
        return _end_after_exits(state)
    state = replace(state, why=_why_once_all_ended(state))  # a failure may have followed from a lost node
    could_not_start = state.generation.start_failure is not None
    if state.end.no_restart or could_not_start or state.why not in MAY_RESTART:
        return end_job(state)
    if state.why not in NO_FAILURE:
        return _restart_after_failure(state, at)
    return _restart(state, at)


def _why_once_all_ended(state: State) -> Why | None:
    """Return why the generation has ended, now that the ends of all workers are known."""
    start_failure, failure = state.generation.start_failure, state.generation.failure
    if start_failure is not None:
        return Why.FAILED if state.why in NO_FAILURE else state.why  # else another generation would follow
    only_follows = failure is None or follows_another(failure)
    are_parted = bool(state.generation.lost or state.partition.not_hearing)
    return Why.NODE_LOST if state.why is Why.FAILED and are_parted and only_follows else state.why


def _restart_after_failure(state: State, at: float) -> Result:
    """Start another generation if restarts are left and one may help, without a node whose machine seems to be at fault."""
    policy, generation = state.policy, state.generation
    too_few = len(state.members) < policy.min_nodes
    # in an elastic job that has nodes enough, a lost one costs no restart
    costs_restart = state.why is not Why.NODE_LOST or too_few
    if policy.max_restarts > 0 or not costs_restart:  # else the failure ends the job, whatever steps were made
        # a new step gives the restart back; generations without one are counted
        state = replace(state, restarts=state.restarts.after_steps(generation, policy.max_no_progress))
    restarts = state.restarts
    can_have_enough = policy.nodes_are_replaceable or not too_few
    is_allowed = can_have_enough and not restarts.are_used_up(policy, at)
    if costs_restart and not is_allowed and not restarts.gave_up:  # of a job that gave up, the line below says why
        return end_job(state)
    if reason := restarts.why_not_again(policy, state.why, generation):
        return _with_line(f"not started again: {reason}", end_job(state))
    sick_node = restarts.sick_node(policy, state.members, state.why, generation)
    if sick_node is None or generation.failure is None:
        return _restart(state, at, costs_restart=costs_restart)
    without_sick = replace(state, members=state.members.without(sick_node.id))
    reason = f"left out, since its workers failed first twice in a row: {generation.failure.how}"
    state, then = _restart(without_sick, at, costs_restart=costs_restart)
    hint = "`ddplaunch doctor` examines it"  # `unfit`: its machine is reported as one at fault
    return state, (*then, actions.Refuse(sick_node.id, reason, exitcodes.NODE_LOST, hint, unfit=sick_node))


def _end_after_exits(state: State) -> Result:
    """End a job whose workers have exited as they should: all with 0, or after a notice (see `_notice_obeyed`).

    After a notice the job is queued again, except if it made no progress for too long.
    """
    if _notice_obeyed(state):
        restarts = state.restarts.after_steps(state.generation, state.policy.max_no_progress)
        state = replace(state, restarts=restarts)  # which the next start of the job is to know
        if restarts.gave_up:
            reason = restarts.why_not_again(state.policy, state.why, state.generation)
            return _with_line(f"not queued again: {reason}", end_job(state))
    return end_job(state)


def _with_line(text: str, result: Result) -> Result:
    """Return a result whose first action prints this line."""
    state, then = result
    return state, (actions.Print(text), *then)


def _restart(state: State, at: float, *, costs_restart: bool = False) -> Result:
    """Start another generation after a pause; if node 0 is leaving, leave the job, or end it if there is no other node.

    The more generations in a row failed at once, the longer the pause. `costs_restart`: the restart counts for --max-restarts.
    """
    own = state.members.get(SELF_ID)  # None: the coordinator is in the command that started all agents, on no node
    if own is not None and own.is_leaving:
        if len(state.members) > 1:
            return leave_job(state, own.leave_signal)
        return end_job(replace(state, why=Why.SIGNALLED, signum=own.leave_signal))  # nobody is left to wait
    restarts = state.restarts.after_generation(state.why, state.generation, at)
    if costs_restart:
        restarts = restarts.with_restart(at, state.policy.max_restarts)
    pause = 0.0 if state.why is Why.NODE_JOINED else pause_after(restarts.short_lives)
    return _begin_pause(replace(state, restarts=restarts), at, pause)


def _begin_pause(state: State, at: float, seconds: float) -> Result:
    """Pause for so many seconds at least, and report the failure of the generation that has ended."""
    wait = max(seconds, state.rendezvous.earliest_start - at)
    rendezvous = replace(state.rendezvous, port_deadline=None)
    state = replace(state, phase=Phase.PAUSING, phase_deadline=at + wait, rendezvous=rendezvous)
    return state, () if state.why in NO_FAILURE else (actions.ReportFailure(wait),)


def leave_job(state: State, signum: int) -> Result:
    """End this coordinator, whose agent has received the signal, while the other nodes wait until it is started again."""
    leave = actions.LeaveJob(0 if state.end.front_of_node_0_is_lost else signum)
    return ended_here(state, exitcodes.of_signal(signum)), (leave, actions.Release(SELF_ID, signum))


def ended_here(state: State, status: int) -> State:
    """Return the state of a coordinator that has ended with this status, while the others wait for another one."""
    return replace(state, phase=Phase.ENDED, end=replace(state.end, status=status))


def end_job(state: State, error: str = "", hint: str = "") -> Result:
    """End the job; `error` says what was wrong, if it is not in the state, and `hint` what to type."""
    requeue = 0 if state.restarts.gave_up else _notice_obeyed(state)
    status, between_generations = _status(state, requeue), state.phase in BETWEEN_GENERATIONS
    end = replace(state.end, status=status, requeue=requeue, between_generations=between_generations)
    return replace(state, phase=Phase.ENDED, end=end), (actions.EndJob(status, error, requeue, hint),)


def status_if_ending(before: State, after: State, at: float) -> int | None:
    """Return the status of a job that is being stopped for good since this step; None if it is not, or not for good.

    The status of a failed worker is not known yet: its node reports it when all its workers have ended.
    """
    if after.phase is not Phase.STOPPING or _reasons_to_end(before) == _reasons_to_end(after):
        return None
    is_spent = after.why in (Why.FAILED, Why.HUNG) and after.restarts.are_used_up(after.policy, at)
    is_ending = after.end.no_restart or after.why not in MAY_RESTART or is_spent
    return _status(after, 0) if is_ending else None


def _reasons_to_end(state: State) -> tuple[Phase, Why | None, int, bool]:
    return state.phase, state.why, state.signum, state.end.no_restart


def _status(state: State, requeue: int) -> int:
    """Return the exit status of the job; `requeue` is the notice after which the job is queued again; 0: it is not."""
    if requeue:
        return exitcodes.of_signal(requeue)
    if state.restarts.gave_up:
        return exitcodes.NO_PROGRESS
    start_failure = state.generation.start_failure
    match state.why:
        case Why.FAILED if start_failure is not None:
            return start_failure.status
        case Why.FAILED if (first := state.generation.failure) is not None:
            return failure_status(first)
        case Why.SIGNALLED:
            return exitcodes.of_signal(state.signum)
        case Why.TIMED_OUT:
            return exitcodes.TIMEOUT
        case Why.HUNG:
            return exitcodes.HANG
        # the front, the process that was typed, was killed; of several nodes, one without its front is a lost node
        case Why.FRONT_LOST if len(state.members) == 1:
            return exitcodes.of_signal(SIGKILL)
        case Why.NOT_MET:
            return exitcodes.RENDEZVOUS
        case Why.FINISHED:
            return exitcodes.OK
    return exitcodes.NODE_LOST


# --- a notice: a signal by which a scheduler or a user announces the end of the job, for which the workers save and exit


def _notice_obeyed(state: State) -> int:
    """Return the notice after which all workers of all nodes exited; 0 if a worker failed, a node was lost, or no notice came."""
    generation, notice = state.generation, state.generation.notice
    if not notice or state.end.abandoned or generation.lost or generation.start_failure is not None:
        return 0
    has_ended = state.why in (Why.FINISHED, Why.FAILED, Why.SIGNALLED, Why.FRONT_LOST)
    return notice if has_ended and all_exited_after(generation.exits, notice, state.signum) else 0
