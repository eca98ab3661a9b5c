"""`ddplaunch logs` where a job was typed that runs on other hosts: over ssh, it has each host show what lies there."""

from __future__ import annotations

import os
import selectors
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from typing import IO

from ddplaunch.control.questions import NodeStatus
from ddplaunch.control.requests import TypedHere
from ddplaunch.errors import LaunchError
from ddplaunch.exitcodes import of_signal
from ddplaunch.fields import line as printable
from ddplaunch.plan.ranks import compress
from ddplaunch.report.words import these_ranks
from ddplaunch.runs import find
from ddplaunch.runs.known import Known

_CHUNK = 1 << 16  # bytes
_SSH = ("ssh", "-T", "-x", "-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none")


def is_elsewhere(run: Known) -> bool:
    """Whether the folder of a run that was typed here is on the disks of its hosts."""
    return run.replies is not None and run.replies.typed is not None and not (run.folder and os.path.isdir(run.folder))


def show(
    run: Known, ranks: Collection[int] | None, options: Sequence[str], *, follow: bool, say: Callable[[str], None]
) -> int:
    """Write the logs of these ranks to stdout, or of all, node by node, or line by line as they come; give the exit status.

    `options` are those of `ddplaunch logs` besides -r.

    Raises:
        LaunchError: there are no such ranks, or it is not known how to reach their hosts.
        BrokenPipeError: the reader of stdout has gone.
    """
    assert run.replies is not None
    asked, typed = run.replies.run, run.replies.typed
    assert asked is not None
    assert typed is not None
    on = {node.node_rank: {worker.rank for worker in node.answer.workers} for node in run.replies.nodes
          if isinstance(node.answer, NodeStatus) and node.node_rank is not None}  # fmt: skip
    if not on:
        raise LaunchError(
            f"it is not known where the logs of {run.name} are: {'; '.join(find.silent(run.replies.nodes))}"
        )
    if not run.folder:
        raise LaunchError(f"run {run.name} keeps no logs")
    if not all(node < len(typed.hosts) for node in on):
        raise LaunchError(f"the logs of {run.name} are not here, but on {asked.host}, in {printable(run.folder)}")
    known = set().union(*on.values())
    if unknown := set(ranks or ()) - known:
        if asked.world_size and (never := {rank for rank in unknown if rank >= asked.world_size}):
            raise find.no_such_ranks(run.name, never, asked.world_size)
        raise LaunchError(f"it is not known where {these_ranks(unknown)} of {run.name} runs: its node does not answer")
    lines = [
        (node, sorted(here), _line(typed, node, run.folder, here if ranks is not None else None, options))
        for node in sorted(on)
        if (here := on[node] if ranks is None else on[node] & set(ranks))
    ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(of_signal(signal.SIGTERM)))  # no ssh outlives this
    if follow:
        return _follow([argv for _, _, argv in lines])
    status = 0
    for node, shown, argv in lines:
        say(f"{these_ranks(shown)}, on {printable(typed.hosts[node])}:")
        sys.stdout.flush()
        with subprocess.Popen(argv, stdin=subprocess.DEVNULL) as process:
            try:
                status = max(status, process.wait())
            finally:
                process.terminate()
    return status


def _line(typed: TypedHere, node: int, folder: str, ranks: Collection[int] | None, options: Sequence[str]) -> list[str]:
    chosen = ["-r", compress(ranks)] if ranks is not None else []
    command = [typed.python, "-m", "ddplaunch", "logs", folder, *chosen, *options]
    return [*_SSH, "--", typed.hosts[node], f"exec {shlex.join(command)}"]


def _follow(lines: Sequence[Sequence[str]]) -> int:
    """Run these, and write what they print as it comes, in whole lines."""
    processes = [subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) for argv in lines]
    out, rests = sys.stdout.buffer, dict.fromkeys(range(len(lines)), b"")
    try:
        with selectors.DefaultSelector() as selector:
            for number, process in enumerate(processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, number)
            while selector.get_map():
                for key, _ in selector.select():
                    data = os.read(key.fd, _CHUNK)
                    whole, newline, rest = (rests[key.data] + data).rpartition(b"\n")
                    rests[key.data] = rest if data else b""
                    out.write(whole + newline if data else rest)
                    if not data:
                        selector.unregister(key.fileobj)
                out.flush()
        return max(process.wait() for process in processes)
    finally:
        for process in processes:
            process.terminate()
            _close(process.stdout)


def _close(file: IO[bytes] | None) -> None:
    if file is not None:
        file.close()
