"""Who is held by a debugger: a worker that failed has the terminal, others wait for it, some are attached to. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from ddplaunch.supervise.node import actions, events
from ddplaunch.supervise.node.state import State
from ddplaunch.supervise.node.step import END_TIMEOUT
from ddplaunch.supervise.node.teardown import Result

Event = events.TerminalAsked | events.TerminalReturned | events.DebuggerAttached | events.DebuggerDetached


def step(state: State, event: Event) -> Result:
    """Return the state after `event` and what is to be done."""
    match event:
        case events.TerminalAsked():
            return _asked(state, event)
        case events.TerminalReturned():
            return _returned(state, event)
        case events.DebuggerAttached(rank):
            after = replace(state, attached=state.attached | {rank})
        case events.DebuggerDetached(rank, at):
            after = replace(state, attached=state.attached - {rank}, still_since=at)
    return after, _timeout(state, after)


def _asked(state: State, event: events.TerminalAsked) -> Result:
    """Lend the terminal to the first worker that has failed; hold the next ones; refuse it when the job is about to end."""
    rank, what = event.rank, event.what
    if not state.is_going or state.was_debugged or rank not in state.alive:
        return state, (actions.RefuseTerminal(rank),)
    if state.debugger:
        (holder,) = state.debugger
        line = f"rank {rank} failed, too ({what}), and is held while rank {holder} is in the debugger"
        return replace(state, queued=(*state.queued, rank)), (actions.Print(line),)
    lent = replace(state, at_terminal=rank)
    line = f"rank {rank} failed ({what}): its debugger has the terminal, the others are held"
    return lent, (actions.Print(line), *_timeout(state, lent), actions.LendTerminal(rank))


def _returned(state: State, event: events.TerminalReturned) -> Result:
    """Have the workers that failed end, once the user has left the debugger of the first of them."""
    after = replace(state, queued=tuple(rank for rank in state.queued if rank != event.rank))
    if state.at_terminal != event.rank:
        return after, ()
    end_by = None if state.raised_deadline is None else event.at + END_TIMEOUT
    refused = tuple(actions.RefuseTerminal(rank) for rank in state.queued)
    return replace(after, was_debugged=True, queued=(), raised_deadline=end_by), (actions.ShowOutput(), *refused)


def _timeout(before: State, after: State) -> tuple[actions.Action, ...]:
    return () if before.is_held == after.is_held else (actions.HoldTimeout(after.is_held),)
