"""The process that makes the rows of --live, its viewer: it asks the run as `ddplaunch top` does, and writes to no terminal."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Mapping

from ddplaunch.record.run_socket import SocketPath
from ddplaunch.record.seen.collectives import Wait, waits
from ddplaunch.record.window.questions import AskStacks, AskStatus
from ddplaunch.record.window.rows import LONGEST, Drawn, decode_draw, encode, snapshot_parts
from ddplaunch.system.console.streams import use_colour
from ddplaunch.system.console.tables import Look, section, written
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.fields import text
from ddplaunch.tools.runs import client, ps, stacks
from ddplaunch.tools.runs.find import of_running
from ddplaunch.tools.runs.live_rows import LiveRows

_ANSWER_WITHIN = 0.5  # seconds that the nodes have to answer
_LOOK_EVERY = 1.0  # seconds from one look to the next, more where one costs more than
_SHARE_OF_CORE = 0.006  # of a core: here, and in the agent of the node with the most workers
_CPU_OF_WORKER = 1e-4  # seconds of that agent's CPU for each of them, as was measured
_LONGEST_PAUSE = 10.0  # seconds from one look to the next, whatever it costs
_CONFIRM_AFTER = 2.0  # seconds from a first look that finds ranks waiting to the second one
# seconds from one question about collectives to the next, twice as long where the ranks have moved
_ASK_AGAIN_AFTER = 10.0
_MOST_LISTED = 16  # that a snapshot lists


def serve(connection: socket.socket, env: Mapping[str, str]) -> None:
    """Answer the requests of the front (the process that was typed) for rows, or for a snapshot of the job, until it ends."""
    viewer = _Viewer(env)
    while data := connection.recv(LONGEST):
        draw = decode_draw(data)
        if draw.snapshot:
            replies = snapshot_parts(f"{viewer.snapshot(draw.socket_path, draw.columns)}\n")
        else:
            replies = [Drawn(text(viewer.rows(draw.socket_path, draw.columns, draw.lines)))]
        for reply in replies:
            connection.send(encode(reply))


class _Viewer:
    """Asks the job for the status of its workers (a look) as often as that costs little, and makes what --live shows."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """Know no job yet: each request of the front names the socket of its job."""
        self._colour = use_colour(env, isatty=True)
        self._rows = LiveRows()
        self._next_look_at = 0.0  # monotonic seconds, as all times here
        self._ask_for_waits_at = 0.0  # not before this time
        self._pause = _ASK_AGAIN_AFTER  # seconds from the last question about collectives to the next
        self._waits: list[Wait] = []  # what the last question about collectives found

    def rows(self, path: SocketPath, columns: int, lines: int) -> str:
        """Return the rows for a terminal of this size, after a look at the job if one is due."""
        cpu_before, now = time.process_time(), time.monotonic()
        if now >= self._next_look_at and (replies := client.ask(path, AskStatus(), _ANSWER_WITHIN)) is not None:
            self._rows.on_replies(replies, time.monotonic())
            if self._rows.stands(now) and now >= self._ask_for_waits_at:
                self._look_for_waits(path)
            workers_by_node = Counter(id(node) for node, _ in replies.workers)
            agents_cpu = max(workers_by_node.values(), default=0) * _CPU_OF_WORKER
            cpu = max(time.process_time() - cpu_before, agents_cpu)
            pause = cpu / _SHARE_OF_CORE  # after which looks have cost that share of the time
            self._next_look_at = now + max(_LOOK_EVERY, min(pause, _LONGEST_PAUSE))
        # half of the lines are left to the output of workers
        shown = self._rows.render(time.monotonic(), columns - 1, max(1, lines // 2))
        return written([section(*shown)], Look(self._colour, columns)) if shown else ""

    def _look_for_waits(self, path: SocketPath) -> None:
        """Ask in which collectives ranks wait, and show those in which they waited at the last question too; plan the next."""
        replies = client.ask(path, AskStacks(stacks.WITHIN, frames=False), stacks.WITHIN + _ANSWER_WITHIN)
        before, self._waits = self._waits, waits(replies.samples if replies is not None else [])
        confirmed = [wait for wait in self._waits if wait in before]
        self._rows.show_waits(confirmed)
        if self._waits and not before:  # seen for the first time
            self._ask_for_waits_at = time.monotonic() + _CONFIRM_AFTER
            return
        all_have_moved = bool(self._waits) and not confirmed
        self._waits = confirmed  # a new wait is to be seen twice again
        self._pause = self._pause * 2 if all_have_moved else _ASK_AGAIN_AFTER
        self._ask_for_waits_at = time.monotonic() + self._pause

    def snapshot(self, path: SocketPath, columns: int) -> str:
        """Return what `ddplaunch ps` shows, if the workers are few, then what `ddplaunch stacks` shows."""
        look = Look(self._colour, columns)
        replies = client.ask(path, AskStatus(), _ANSWER_WITHIN)
        if replies is None:
            return "ddplaunch: the job has just ended"
        run = of_running(replies)
        has_few = replies.run is not None and replies.run.world_size <= _MOST_LISTED
        shown = written([ps.render(replies) if has_few else ps.facts_of(replies)], look)
        try:
            return f"{shown}\n{stacks.text_of(run, stacks.Wanted(), look)}"
        except LaunchError as error:
            return f"{shown}\nddplaunch: {error.message}"
