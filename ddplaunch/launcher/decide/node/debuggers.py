"""Which workers debuggers of ours hold: one that failed has the terminal, others wait for it, some are attached to. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from ddplaunch.launcher.decide.node import actions, events
from ddplaunch.launcher.decide.node.state import END_TIMEOUT, Debugging, State
from ddplaunch.launcher.decide.node.teardown import Result


def step(state: State, event: events.OfDebuggers) -> Result:
    """Do the part of the agent's `step` that is about debuggers."""
    match event:
        case events.TerminalRequested():
            return _on_terminal_requested(state, event)
        case events.TerminalReturned():
            return _on_terminal_returned(state, event)
        case events.DebuggerAttached(rank):
            return _on_debugger_attached(state, rank)
        case events.DebuggerDetached(rank, at):
            return _on_debugger_detached(state, rank, at)


def _on_terminal_requested(state: State, event: events.TerminalRequested) -> Result:
    """Lend the terminal to the first worker that has failed; refuse when the job is about to end.

    A job has one debugger, once (`was_debugged`). Workers that fail meanwhile are held, and refused once the user has left it.
    """
    rank = event.rank
    if state.is_ending or rank not in state.alive or state.debugging.was_debugged:
        return state, (actions.RefuseTerminal(rank),)
    if state.terminal_holder:
        (holder,) = state.terminal_holder
        line = f"rank {rank} failed, too ({event.what}), and is held while rank {holder} is in the debugger"
        queued = (*state.debugging.queued, rank)
        return replace(state, debugging=replace(state.debugging, queued=queued)), (actions.Print(line),)
    line = f"rank {rank} failed ({event.what}): its debugger has the terminal, the others are held"
    state, pauses_limits = _with_debugging(state, replace(state.debugging, at_terminal=rank))
    return state, (actions.Print(line), *pauses_limits, actions.LendTerminal(rank))


def _on_terminal_returned(state: State, event: events.TerminalReturned) -> Result:
    """Have the workers that failed end, once the user has left the debugger of the first of them."""
    queued = tuple(rank for rank in state.debugging.queued if rank != event.rank)
    if state.debugging.at_terminal != event.rank:
        return replace(state, debugging=replace(state.debugging, queued=queued)), ()
    refusals = tuple(actions.RefuseTerminal(rank) for rank in queued)
    debugging = replace(state.debugging, was_debugged=True, queued=())
    return replace(_with_time_to_end(state, event.at), debugging=debugging), (actions.ShowOutput(), *refusals)


def _on_debugger_attached(state: State, rank: int) -> Result:
    """Note that a debugger holds this worker."""
    return _with_debugging(state, replace(state.debugging, attached=state.debugging.attached | {rank}))


def _on_debugger_detached(state: State, rank: int, at: float) -> Result:
    """Let the worker go on that a debugger held. If the worker has raised an exception, its time to end begins now."""
    state = replace(_with_time_to_end(state, at), progress=replace(state.progress, idle_since=at))
    return _with_debugging(state, replace(state.debugging, attached=state.debugging.attached - {rank}))


def _with_time_to_end(state: State, at: float) -> State:
    """Return the state in which a worker that has raised has its full time to end from now on: a debugger has held it."""
    should_exit_by = None if state.raised.should_exit_by is None else at + END_TIMEOUT
    return replace(state, raised=replace(state.raised, should_exit_by=should_exit_by))


def _with_debugging(before: State, debugging: Debugging) -> Result:
    """Note which workers are held. Time limits stop when the first worker is held in a debugger, and go on after the last."""
    state = replace(before, debugging=debugging)
    is_same = before.debugger_suspends_limits == state.debugger_suspends_limits
    return state, () if is_same else (actions.PauseLimits(state.debugger_suspends_limits),)
