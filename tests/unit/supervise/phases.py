"""The two `step`s, held to the tables in the docstrings of their phases."""

from enum import Enum
from typing import Any

from ddplaunch.launcher.decide import job, node


def changes(phases: type[Enum]) -> set[tuple[str, str]]:
    """Return the changes of phase in the table: from the first word of a row to its last."""
    rows = [line.split() for line in (phases.__doc__ or "").splitlines()]
    return {(row[0], row[-1]) for row in rows if row and row[0] in phases.__members__}


CHANGES = {phases: changes(phases) for phases in (node.Phase, job.Phase)}


def checked(before: Any, result: Any) -> Any:
    """Return the result of a step, whose change of phase is in the table."""
    old, new = before.phase, result[0].phase
    assert old is new or (old.name, new.name) in CHANGES[type(old)]
    return result


def node_step(state: node.State, event: node.Event) -> node.Result:
    result: node.Result = checked(state, node.step(state, event))
    return result


def job_step(state: job.State, event: job.Event) -> job.Result:
    result: job.Result = checked(state, job.step(state, event))
    return result
