"""`ddplaunch doctor --nodes` and `--forget`: the nodes whose machine has failed lately."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from ddplaunch.record import bad_nodes
from ddplaunch.record.folders import bad_nodes_file, short
from ddplaunch.system.console.tables import NAME, NOTE, Look, table, written
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.words import count, why_failed


def show(env: Mapping[str, str], forget: str | None, *, as_json: bool) -> str:
    """Return what is remembered, for stdout; first forget the node that is named.

    Raises:
        LaunchError: nothing is known of that node, or the file cannot be read or written.
    """
    path, now = bad_nodes_file(env), time.time()
    failures = bad_nodes.read(path, now)
    if forget is None:
        return _shown(failures, env, now, as_json=as_json)
    if not bad_nodes.among(failures, [forget]):
        raise LaunchError(
            f"--forget {forget}: no failure of this node is remembered",
            hint="`ddplaunch doctor --nodes` shows all that is remembered",
        )
    try:
        forgotten = bad_nodes.forget(path, forget, now)
    except OSError as error:
        raise LaunchError(f"{path}: {why_failed(error)}") from None
    return f"forgot {count(forgotten, 'failure')} of {forget}"


def _shown(failures: list[bad_nodes.Failure], env: Mapping[str, str], now: float, *, as_json: bool) -> str:
    if as_json:
        return msgspec.json.format(msgspec.json.encode({"schema": 1, "failures": failures}), indent=1).decode()
    if not failures:
        return "no node is remembered on which the machine has failed in the last 7 days"
    rows = [
        (host, what, f"run {short(run)}" if run else "", why) for host, what, run, why in bad_nodes.table(failures, now)
    ]
    return written([table(rows, styles=(NAME, "", NOTE, NOTE))], Look.of_stdout(env))
