"""When connections start and end: which host is next, and until when its greeting and its end are awaited. Reports no errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from ddplaunch.loop.loop import Loop
from ddplaunch.process.child import handled_signals
from ddplaunch.remote.connection import HostConnection, HostPhase
from ddplaunch.words import some

MAX_STARTING = 64  # hosts whose agent is being started
NOTICE_AFTER = 3.0  # seconds until hosts whose agents have not started yet are named
QUIT_TIMEOUT = 5.0  # seconds that an agent needs to end when its workers have
_LOOK_AGAIN = 0.5  # seconds until it is looked whether output is read again


class Startup:
    """Starts and ends the connections of a job."""

    def __init__(
        self,
        loop: Loop,
        hosts: Sequence[HostConnection],
        *,
        env: Mapping[str, str],
        open_files: tuple[int, int],
        rdzv_timeout: float,
        quit_timeout: float,
        has_failed: Callable[[], bool],
        unconnected: Callable[[Sequence[HostConnection]], None],
        notify: Callable[[str], None],
    ) -> None:
        """`env` and `open_files` are for the processes that connect to the hosts.

        `rdzv_timeout` is the seconds in which all hosts must have connected, `quit_timeout` those in which they must have
        ended after `disconnect`. No more agents are started once the job `has_failed`. `unconnected` takes the hosts from
        which no greeting has come in time, `notify` prints a line.
        """
        self._loop = loop
        self._hosts = hosts
        self._env = env
        self._open_files = open_files
        self._quit_timeout = quit_timeout
        self._has_failed = has_failed
        self._unconnected = unconnected
        self._notify = notify
        self.is_stopped = False  # no more agents are started
        self.is_read = True  # whether what the hosts print is read: nothing is killed while it is not
        self._connect_by = loop.timer(loop.now() + rdzv_timeout, self._give_up_unconnected)
        self._notice_at = loop.timer(loop.now() + NOTICE_AFTER, self._name_silent)
        self._end_by = loop.timer(None, self._kill_remaining)

    @property
    def all_closed(self) -> bool:
        """Whether all connections are closed."""
        return all(host.phase is HostPhase.CLOSED for host in self._hosts)

    @property
    def only_first_connected(self) -> bool:
        """Whether the first host is connected and all others are closed."""
        first, *others = self._hosts
        return first.phase is HostPhase.CONNECTED and all(host.phase is HostPhase.CLOSED for host in others)

    @property
    def is_undecided(self) -> bool:
        """Whether some host that was started may yet report that the job cannot run there."""
        started = (host for host in self._hosts if host.phase in (HostPhase.STARTING, HostPhase.CONNECTED))
        return any(not host.is_ready for host in started)

    def start_next(self) -> None:
        """Start the agents of the next hosts, MAX_STARTING at a time."""
        starting = sum(host.phase is HostPhase.STARTING for host in self._hosts)
        for host in self._hosts:
            if self.is_stopped or self._has_failed() or starting >= MAX_STARTING:
                return
            if host.phase is HostPhase.WAITING:
                host.start(self._env, handled_signals(), self._open_files)
                starting += 1
        if not starting:
            self._connect_by.cancel()

    def _give_up_unconnected(self) -> None:
        """Stop waiting for greetings."""
        waiting = (HostPhase.WAITING, HostPhase.STARTING)
        self._unconnected([host for host in self._hosts if host.phase in waiting])

    def _name_silent(self) -> None:
        """Say which hosts are waited for, and what may be the reason."""
        if silent := [host for host in self._hosts if host.phase is HostPhase.STARTING]:
            command = os.path.basename(silent[0].agent.argv[0])
            why = ": a slow login, or a start-up file such as ~/.bashrc that reads stdin?" if command == "ssh" else ""
            self._notify(f"waiting for {some(map(str, silent))}: {command} has not started ddplaunch there yet{why}")

    def send_heartbeats(self, timeout: float, interval: float, *, reading: bool) -> None:
        """Send heartbeats at this interval; kill connections without a reply for `timeout` seconds.

        Heartbeats are counted, not seconds, so that a pause of this process makes no host look lost. `reading` is whether
        replies are read.
        """
        for host in self._hosts:
            if host.phase is HostPhase.CONNECTED and host.send_heartbeat(reading=reading) > timeout / interval:
                host.kill_for(f"silent for {timeout:g} s")

    def stop_starting(self) -> None:
        """Start no more agents, and stop waiting for greetings."""
        self.is_stopped = True
        self._connect_by.cancel()
        self._notice_at.cancel()
        for host in self._hosts:
            host.give_up()

    def disconnect(self) -> None:
        """Close the stdin of all connections, at which their agents end."""
        self.stop_starting()
        for host in self._hosts:
            host.close_stdin()
        self.end_within(self._quit_timeout)

    def end_within(self, within: float) -> None:
        """Wait at most so many seconds for the connections to close, unless more output comes."""
        self._end_by.set_by(self._loop.now() + within)

    def extend_deadline(self) -> None:
        """Do not kill a connection in the middle of its output."""
        if self._end_by.is_set:
            self._end_by.set(max(self._end_by.at, self._loop.now() + QUIT_TIMEOUT))

    def _kill_remaining(self) -> None:
        """Kill the connections that are still open; while their output is not read, later."""
        if not self.is_read:
            self._end_by.set(self._loop.now() + _LOOK_AGAIN)
            return
        for host in self._hosts:
            if host.phase is not HostPhase.CLOSED:
                self._notify(f"{host} has not reported that its workers have ended")
                host.kill()
