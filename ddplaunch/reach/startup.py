"""When the hosts of a job are called, called again, found to be silent, and ended; in the process that has them called.

sshd closes a new connection while too many others have not logged in yet (MaxStartups, sshd_config(5)). Hosts behind one jump
host share its limit. So of those a few are called at first, and slowly more as they connect. A host whose connection was closed
is called again after a pause. From then on no more hosts are called at a time than there was room for, if these are more than a
few.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

from ddplaunch.reach.connections import HostConnection, HostPhase, RemoteJob
from ddplaunch.reach.silence import SHORTEST_LIMIT
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.child import handled_signals
from ddplaunch.system.words import some

MAX_STARTING = 64  # hosts whose agent is being started
LEAST_AT_ONCE = 8  # that many are called at a time in any case: one that does not answer must not keep others waiting
CONNECTED_FOR_ONE_MORE = 4  # hosts behind a jump host that have connected, for each one more that is called at a time
MAX_REPEATS = 6  # how often a host is called again
FIRST_PAUSE = 0.5  # seconds until then, about; each further pause is twice as long
NOTICE_AFTER = 3.0  # seconds until hosts whose agents have not started yet are named
QUIT_TIMEOUT = 5.0  # seconds that an agent needs to end when its workers have
_LOOK_AGAIN = 0.5  # seconds until it is looked whether output is read again
_LONGEST_BEAT = 1.0  # seconds from one heartbeat to the next; less for a short heartbeat timeout
_NOT_CONNECTED = (HostPhase.WAITING, HostPhase.STARTING)


def pause(repeats: int, chance: float) -> float:
    """Return the seconds until the next call of a host, the first or a further repeat; `chance`, 0 to 1, keeps calls apart."""
    return float(FIRST_PAUSE * 2 ** (repeats - 1) * (0.5 + chance))


class CallsOwner(Protocol):
    """Who has hosts called."""

    @property
    def may_call(self) -> bool:
        """Whether any more hosts may be called now."""


class Calls:
    """Which hosts are called next: a process is started, such as ssh, that leads to the host and starts the agent there."""

    def __init__(
        self,
        loop: Loop,
        hosts: Sequence[HostConnection],
        env: Mapping[str, str],
        open_files: tuple[int, int],
        owner: CallsOwner,
    ) -> None:
        """Prepare to start the processes that lead to `hosts`, with these variables and RLIMIT_NOFILE (soft, hard)."""
        self._loop = loop
        self._hosts = hosts
        self._env = env
        self._open_files = open_files
        self._owner = owner
        self._most_at_once = MAX_STARTING  # hosts
        # until it is known that ssh does not lead through a jump host, whose sshd has little room; one host stands for all
        self._begins_with_few = len(hosts) > LEAST_AT_ONCE and is_ssh(hosts[-1].agent.argv)
        if self._begins_with_few:
            loop.ask(partial(leads_through_another, hosts[-1].agent.argv, env), None, self._on_way_known)
        self._repeats: dict[HostConnection, int] = {}
        self._not_before: dict[HostConnection, float] = {}  # of hosts that are called again
        self._next_at = loop.timer(None, self.make_next)

    @property
    def waiting_again(self) -> list[HostConnection]:
        """The hosts whose connection was closed, and that have not connected yet."""
        return [host for host in self._repeats if host.phase in _NOT_CONNECTED]

    def make_next(self) -> None:
        """Call the next hosts, as many as may be called at a time. To be called whenever one has connected or failed."""
        now = self._loop.now()
        for host in self._hosts:
            if host.phase is not HostPhase.WAITING or self._not_before.get(host, now) > now:
                continue
            # counted for each: one that cannot be started has others called before `start` returns
            if self._number_starting >= self._limit or not self._owner.may_call:
                break
            host.start(self._env, self._open_files, handled_signals())
        waiting = (at for host, at in self._not_before.items() if host.phase is HostPhase.WAITING and at > now)
        self._next_at.set(min(waiting, default=None))

    def _on_way_known(self, through_another: bool | None) -> None:
        """Call many hosts at a time if ssh reaches them directly; None: it is not known. Called by the loop."""
        if through_another is False:
            self._begins_with_few = False
            self.make_next()

    def repeat(self, host: HostConnection) -> bool:
        """Call a host again later that had no room for a connection; return False if it was called often enough."""
        had_room = self._number_starting  # this host, which had none, is not among them any more
        self._most_at_once = max(LEAST_AT_ONCE, min(self._most_at_once, had_room))
        repeats = self._repeats.get(host, 0) + 1
        if repeats > MAX_REPEATS:
            return False
        from random import random  # few jobs need it

        self._repeats[host] = repeats
        self._not_before[host] = self._loop.now() + pause(repeats, random())
        host.wait_again()
        return True

    @property
    def _limit(self) -> int:
        """How many hosts may be called at a time now."""
        if not self._begins_with_few:
            return self._most_at_once
        connected = sum(host.phase is HostPhase.CONNECTED for host in self._hosts)
        return min(self._most_at_once, LEAST_AT_ONCE + connected // CONNECTED_FOR_ONE_MORE)

    @property
    def _number_starting(self) -> int:
        return sum(host.phase is HostPhase.STARTING for host in self._hosts)


class StartupOwner(Protocol):
    """The dispatcher, as the one whose hosts a `Startup` starts."""

    @property
    def may_start_more(self) -> bool:
        """Whether the job can still begin, so that more agents are worth a start."""

    def say(self, text: str) -> None:
        """Print a line for the user."""

    def never_connected(self, hosts: Sequence[HostConnection]) -> None:
        """Handle hosts on which ddplaunch has not started in time."""


class Startup:
    """When the connections of a job are started, found to be silent, and ended; in the dispatcher."""

    def __init__(self, loop: Loop, job: RemoteJob, hosts: Sequence[HostConnection], owner: StartupOwner) -> None:
        """Prepare; `start_next` begins."""
        self._loop = loop
        self._job = job
        self._hosts = hosts
        self._owner = owner
        self.is_stopped = False  # no more agents are started
        self.output_is_read = True  # the user's reader takes our output; else a host is not to blame for ending late
        self._heartbeat_interval = min(_LONGEST_BEAT, job.spec.heartbeat_timeout / 4)  # seconds
        self._connect_by = loop.timer(loop.now() + job.spec.rdzv_timeout, self._give_up_unconnected)
        self._heartbeat_at = loop.timer(loop.now() + self._heartbeat_interval, self._send_heartbeats)
        self._notice_at = loop.timer(loop.now() + NOTICE_AFTER, self._name_silent)
        self._end_by = loop.timer(None, self._kill_remaining)
        self._job_is_over = False  # hosts only have to close now, and a silent one is waited for less long
        self._calls = Calls(loop, hosts, job.env, job.open_files, self)

    @property
    def all_closed(self) -> bool:
        """Whether all connections are closed."""
        return all(host.phase is HostPhase.CLOSED for host in self._hosts)

    @property
    def is_undecided(self) -> bool:
        """Whether some host that was started may yet report that the job cannot run there."""
        started = (host for host in self._hosts if host.phase in (HostPhase.STARTING, HostPhase.CONNECTED))
        return any(not host.is_ready for host in started)

    def start_next(self) -> None:
        """Start the agents of the next hosts. Called again whenever one has connected or failed."""
        self._calls.make_next()
        if not any(host.phase in _NOT_CONNECTED for host in self._hosts):
            self._connect_by.cancel()

    def call_again(self, host: HostConnection) -> bool:
        """Call a host again later whose sshd has closed the connection; return False if it is not to be called any more."""
        return not self.is_stopped and self._calls.repeat(host)

    @property
    def may_call(self) -> bool:
        """Whether more agents are to be started."""
        return not self.is_stopped and self._owner.may_start_more

    def _give_up_unconnected(self) -> None:
        """Stop waiting for greetings."""
        self._owner.never_connected([host for host in self._hosts if host.phase in _NOT_CONNECTED])

    def _name_silent(self) -> None:
        """Say which hosts are waited for, and what may be the reason."""
        refused = self._calls.waiting_again
        if silent := [host for host in self._hosts if host.phase is HostPhase.STARTING and host not in refused]:
            command = os.path.basename(silent[0].agent.argv[0])
            why = ": a slow login, or a start-up file such as ~/.bashrc that reads stdin?" if command == "ssh" else ""
            self._owner.say(f"waiting for {some(map(str, silent))}: {command} has not started ddplaunch there yet{why}")
        if refused:
            self._owner.say(
                f"waiting for {some(map(str, refused))}: sshd there, or on a jump host, has closed the connection and is called "
                "again, since its MaxStartups may be too low"
            )

    def _send_heartbeats(self) -> None:
        """Send heartbeats at an interval; kill connections without a reply for the heartbeat timeout.

        Heartbeats are counted, not seconds, so that a pause of this process makes no host look lost. Once the job is over,
        its lost hosts are not waited for any longer than its nodes have waited.
        """
        spec, interval = self._job.spec, self._heartbeat_interval
        timeout = spec.heartbeat_timeout
        user_left_it_to_us = spec.may_shorten_silence
        if user_left_it_to_us and self._job_is_over:
            timeout = min(timeout, SHORTEST_LIMIT)  # after which the nodes give a silent host up, in seconds
        most_unanswered = timeout / interval
        self._heartbeat_at.set(self._loop.now() + interval)
        for host in self._hosts:
            if host.phase is HostPhase.CONNECTED:
                unanswered = host.send_heartbeat()
                if unanswered > most_unanswered:
                    host.kill(f"silent for {timeout:g} s")

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
        self.end_within(self._job.spec.grace_period + self._job.spec.heartbeat_timeout + QUIT_TIMEOUT)

    def end_within(self, within: float) -> None:
        """Wait at most so many seconds for the connections to close, unless more output comes: the job is over."""
        self._job_is_over = True
        self._end_by.set_by(self._loop.now() + within)

    def extend_deadline(self) -> None:
        """Do not kill a connection in the middle of its output."""
        if self._end_by.is_set:
            self._end_by.set(max(self._end_by.at, self._loop.now() + QUIT_TIMEOUT))

    def _kill_remaining(self) -> None:
        """Kill the connections that are still open; while their output is held back, later."""
        if not self.output_is_read:
            self._end_by.set(self._loop.now() + _LOOK_AGAIN)
            return
        for host in self._hosts:
            if host.phase is not HostPhase.CLOSED:
                self._owner.say(f"{host} has not reported that its workers have ended")
                host.kill()


# seconds for `ssh -G`, which connects to no host; a command in the configuration (`Match exec`) may take long
_ANSWERS_WITHIN = 1.0
_SETTINGS_THROUGH_ANOTHER = ("proxyjump", "proxycommand")  # as `ssh -G` writes them


def is_ssh(argv: Sequence[str]) -> bool:
    """Return whether this is a command of ssh."""
    return os.path.basename(argv[0]) == "ssh"


def leads_through_another(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """Return whether this command of ssh, whose last word is for the host, leads there through a jump host or a command.

    For a child that is asked, since the answer may take a second.
    """
    import subprocess  # takes 10 ms, and few jobs have many hosts

    try:
        done = subprocess.run(
            [argv[0], "-G", *argv[1:-1]],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ANSWERS_WITHIN,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    settings = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if b" " in line.strip())
    return any(settings.get(name.encode(), b"none") != b"none" for name in _SETTINGS_THROUGH_ANOTHER)
