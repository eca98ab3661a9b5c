"""`ddplaunch logs` where a job was typed that runs on other hosts: over ssh, it has each host show what lies there."""

from __future__ import annotations

import os
import selectors
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack

from ddplaunch.record.window.questions import NodeStatus
from ddplaunch.record.window.requests import TypedHere
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.exitcodes import of_signal
from ddplaunch.system.fields import line as printable
from ddplaunch.system.process.apart import waiting
from ddplaunch.system.words import compress, these_ranks
from ddplaunch.tools.runs import find
from ddplaunch.tools.runs.find import Known

_CHUNK = 1 << 16  # bytes
_SSH = ("ssh", "-T", "-x", "-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none")


def is_elsewhere(run: Known) -> bool:
    """Whether the folder of a run that was typed here is on the disks of its hosts."""
    return run.replies is not None and run.replies.typed is not None and not (run.folder and os.path.isdir(run.folder))


def show(
    run: Known, ranks: Collection[int] | None, options: Sequence[str], *, follow: bool, say: Callable[[str], None]
) -> int:
    """Write the logs of these ranks, or of all, to stdout: node by node, or with `follow` as lines come. Return the exit status.

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
    # nodes that were lost have made room for others in the order of the nodes
    names = {host.rpartition("@")[2]: host for host in typed.hosts}
    hosts = {node.node_rank: names.get(node.host, "") for node in run.replies.nodes}
    if not all(map(hosts.get, on)):
        raise LaunchError(f"the logs of {run.name} are not here, but on {asked.host}, in {printable(run.folder)}")
    known = set().union(*on.values())
    if unknown := set(ranks or ()) - known:
        if asked.world_size and (never := {rank for rank in unknown if rank >= asked.world_size}):
            raise find.no_such_ranks(run.name, never, asked.world_size)
        raise LaunchError(f"it is not known where {these_ranks(unknown)} of {run.name} runs: its node does not answer")
    asked_of = {node: sorted(here if ranks is None else here & set(ranks)) for node, here in on.items()}
    count = sum(map(len, asked_of.values()))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(of_signal(signal.SIGTERM)))  # no ssh outlives this
    readers = []
    for node, here in sorted(asked_of.items()):
        if here:
            # a host puts the rank before its lines only where it shows several, or all that may come
            is_bare = len(here) == 1 < count and not (follow and ranks is None)
            argv = _line(typed, hosts[node], run.folder, here if ranks is not None else (), options)
            readers.append(_Reader(argv, b"[%d] " % here[0] if is_bare else b""))
            if not follow:
                say(f"{these_ranks(here)}, on {printable(hosts[node])}:")
                _write(readers[-1:])
    if follow:
        _write(readers)
    return max((reader.process.returncode for reader in readers), default=0)


def _line(typed: TypedHere, host: str, folder: str, ranks: Collection[int], options: Sequence[str]) -> list[str]:
    chosen = ["-r", compress(ranks)] if ranks else []
    command = [typed.python, "-m", "ddplaunch", "logs", folder, *chosen, *options]
    return [*_SSH, "--", host, f"exec {shlex.join(command)}"]


class _Reader:
    """What one host shows, in whole lines."""

    def __init__(self, argv: Sequence[str], prefix: bytes) -> None:
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        self.prefix = prefix
        self._rest = b""

    def lines(self) -> list[bytes] | None:
        """Return the lines that have come; None at the end."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), _CHUNK)
        if not data and not self._rest:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n") if data else (self._rest, b"")
        return lines


def _write(readers: Sequence[_Reader]) -> None:
    """Write the lines of all readers as they come, until every reader has ended."""
    out = sys.stdout.buffer
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for reader in readers:
            stack.enter_context(reader.process)
            stack.callback(reader.process.terminate)  # before it is waited for
            assert reader.process.stdout is not None
            selector.register(reader.process.stdout, selectors.EVENT_READ, reader)
        while selector.get_map():
            with waiting():
                ready = selector.select()
            for key, _ in ready:
                if (lines := key.data.lines()) is None:
                    selector.unregister(key.fileobj)
                    key.data.process.wait()
                else:
                    out.writelines(key.data.prefix + line + b"\n" for line in lines)
            out.flush()
