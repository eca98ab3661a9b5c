"""Limits of time: for how long workers make no progress, and when the limits wait, for a debugger or a suspended job. Pure."""

from __future__ import annotations

from math import isfinite
from signal import SIGTERM

from msgspec.structs import replace

from ddplaunch.launcher.decide.job import actions, events
from ddplaunch.launcher.decide.job.ending import Result, stop
from ddplaunch.launcher.decide.job.state import SELF_ID, Phase, State
from ddplaunch.spec.outcome import Why

# seconds without progress on any node after which that is printed, if --hang-timeout does not end the job
NOTICED = 60.0


def on_node_idle(state: State, event: events.NodeIdle) -> Result:
    """Note for how long a node has made no progress. If no node has for too long, stop all workers, or print it."""
    if state.phase is not Phase.RUNNING or state.suspended_at is not None or state.is_debugged:
        return state, ()
    was_named = isfinite(state.idle_named_at) and state.progress_at <= state.idle_named_at
    state = replace(
        state,
        idle=state.idle.with_item(event.id, (event.since, event.at)),
        progress_at=max(state.progress_at, event.since),
    )
    if was_named and state.progress_at > state.idle_named_at:
        return state, (actions.NameProgress(event.at - state.idle_named_at),)
    limit = state.policy.hang_timeout or NOTICED
    is_named = state.progress_at <= state.idle_named_at
    # a report before that of the awaited node changes nothing: with thousands of nodes, most reports end here
    awaited = state.idle_awaits
    awaits_another = awaited is not None and awaited != event.id and state.runs(awaited)
    if event.at - event.since < limit or is_named or awaits_another:
        return state, ()
    awaited = _must_report_again(state, limit)
    if awaited is not None:
        return replace(state, idle_awaits=awaited), ()
    if state.policy.hang_timeout is not None:
        return stop(state, Why.HUNG, SIGTERM, event.at)
    spans = [state.idle[id] for id in state.running]
    since, until = max(since for since, _ in spans), min(until for _, until in spans)
    state = replace(state, progress_at=since)
    if since <= state.idle_named_at:
        return state, ()  # no progress since it was printed
    return replace(state, idle_named_at=event.at), (actions.NameIdle(until - since),)


def _must_report_again(state: State, limit: float) -> int | None:
    """Return a node without whose next report it is not known whether all nodes were idle together for `limit` seconds.

    None: they were.
    """
    running = state.running
    missing = next((id for id in running if id not in state.idle), None)
    if missing is not None:
        return missing
    since = max(state.idle[id][0] for id in running)
    too_old = [id for id in running if state.idle[id][1] - since < limit]
    # the node that reported last is likely to be the last again
    return max(too_old, key=lambda id: state.idle[id][1], default=None)


def on_limits_paused(state: State, id: int, *, paused: bool) -> Result:
    """Have the time limits wait while a debugger holds a worker of this node; print that once for each other node."""
    if not paused:
        return replace(state, debugging=state.debugging - {id}), ()
    policy = state.policy
    limits = [name for name, limit in (("--timeout", policy.timeout), ("--hang-timeout", policy.hang_timeout)) if limit]
    is_named = id == SELF_ID or id in state.named_as_debugging or not limits
    state = replace(state, debugging=state.debugging | {id}, named_as_debugging=state.named_as_debugging | {id})
    verb = "wait" if len(limits) > 1 else "waits"
    line = f"{state.members[id]} holds a worker in a debugger: {' and '.join(limits)} {verb} until it is left"
    return state, () if is_named else (actions.Print(line),)


def on_resumed(state: State, at: float) -> State:
    """Move the deadlines by the time that the job was suspended."""
    if state.suspended_at is None:
        return state
    pause = at - state.suspended_at
    deadline, job_deadline = state.phase_deadline, state.job_deadline
    if deadline is not None and state.phase is not Phase.RENDEZVOUS:
        deadline += pause
    if job_deadline is not None:
        job_deadline += pause
    return replace(state, suspended_at=None, phase_deadline=deadline, job_deadline=job_deadline)
