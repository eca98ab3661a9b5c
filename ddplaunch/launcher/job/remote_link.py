"""The link of an agent to a coordinator on another host: how it is looked for, reached, lost, and found again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import inf
from signal import SIGTERM
from socket import socket
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.job import messages
from ddplaunch.launcher.job.link import Lease, Link
from ddplaunch.launcher.job.messages import OrderSequence
from ddplaunch.launcher.job.orders import (
    Generation,
    Goodbye,
    JobEnd,
    Lead,
    Leased,
    LookingForCoordinator,
    MeetAt,
    NodeEnd,
    Waits,
)
from ddplaunch.launcher.job.search import Search
from ddplaunch.reach.channel.handshake import Client, Key
from ddplaunch.reach.channel.peer import Greeting, Peer
from ddplaunch.reach.silence import Keepalive, Silence, describe_way
from ddplaunch.spec.outcome import ENDED_ITSELF, Why
from ddplaunch.system import exitcodes
from ddplaunch.system.fields import Malformed, host
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.words import duration, signal_name

if TYPE_CHECKING:
    from ddplaunch.launcher.job.orders import Order, Report
    from ddplaunch.launcher.job.probe import Probe

FIRST_NOTICE_AFTER = 3.0  # seconds until it is first reported where node 0 is looked for
NEXT_NOTICE_AFTER = 30.0  # seconds from one such notice to the next
# seconds until the name of a node 0 that was lost is looked up again: it may come back at another address
MAY_HAVE_MOVED_AFTER = 5.0


class CoordinatorElsewhere(Struct, frozen=True, kw_only=True):
    """A coordinator on another host: what this agent says to it first, and for how long it waits for it."""

    key: Key  # by which both prove that they are of one job
    first_message: messages.FirstMessage  # of a hello, what depends on the connection is set when that is open
    keepalive: Keepalive  # when a silent coordinator counts as lost; earlier than that only if its pings say so
    rdzv_timeout: float  # seconds after which a coordinator that was not reached is given up
    how_back: str = ""  # what brings a lost node 0 back, as in "waiting HOW_BACK"; "": nothing does
    command_host: str = ""  # where the command coordinates that has started all agents; "": node 0 coordinates


class _Loss(NamedTuple):
    """How the coordinator was lost, in sentences for the user of this node."""

    error: str  # ends this node, where nothing brings node 0 back
    news_while_waiting: str  # is said, and kept, while this node waits for node 0
    coordinator_goes_on: bool = False  # the coordinator lives, and has given up this node, which looks for it at once


class RemoteLink(Link):
    """The link of an agent to a coordinator elsewhere, with the lease by which its workers may live without a word from there.

    Where node 0 may come back, its loss does not end this node: the workers are stopped, and once nothing of them is left, the
    link looks for node 0 again and says hello as a new node does. A node that node 0 has given up comes back in the same way.
    """

    def __init__(self, loop: Loop, elsewhere: CoordinatorElsewhere, lease: Lease | None = None) -> None:
        """Prepare to look for the coordinator; `aim` or `adopt` follows.

        `lease` limits the life of the workers without a word from the coordinator; None: the job never goes on without a node.
        """
        super().__init__(loop)
        self._elsewhere = elsewhere
        timeout = elsewhere.keepalive.timeout
        self._silence = Silence(timeout, timeout)  # how long the coordinator, and its host, may be silent
        self._heard_at = 0.0  # when the last message came
        self._lease = lease or Lease(inf, loop)  # which never ends
        self._check_lease_at = loop.timer(None, self._check_lease)
        loop.after_pause = self._check_lease  # before what else has become due in a pause of this process
        loop.clock.protect(timeout)  # the loop sleeps so short that no pause of this process uses up that time
        self._peer: Peer | None = None  # the connection to the coordinator; None: it is looked for, or given up
        self._last_orders: OrderSequence | None = None  # those of the last coordinator that was reached
        # where the coordinator is on no node: watches the generation's first node, or is it
        self._first_node_probe: Probe | None = None
        self._how_lost = ""  # how the coordinator was lost, in a sentence, while it is waited for
        self._status_of_ending_job: int | None = None  # None: the job is not being stopped for good, as far as is known
        # what this node has reported once it was to end for a reason of its own, such as a signal
        self._reported_own_stop: node.ReportStopping | None = None
        # when a coordinator that is silent is lost, or one that was not reached is given up
        self._give_up_at = loop.timer(loop.now() + elsewhere.rdzv_timeout, self._on_timeout)
        self._report_search_at = loop.timer(loop.now() + FIRST_NOTICE_AFTER, self._report_search)
        tcp_user_timeout = elsewhere.keepalive.tcp_user_timeout
        self._search = Search(loop, elsewhere.key, self, tcp_user_timeout=tcp_user_timeout)

    # --- connecting

    def aim(self, hosts: Sequence[str], ports: Sequence[int]) -> None:
        """Look for the coordinator at these places."""
        self._search.begin((host, port) for host in hosts for port in ports)

    def adopt(self, sock: socket) -> None:
        """Follow the coordinator at the other end of this connection, which something else carries, as ssh does."""
        other_side = (self._elsewhere.command_host, 0)  # of no port
        Greeting(self._loop, sock, other_side, Client(self._elsewhere.key), self)

    def on_opened(self, peer: Peer) -> None:
        """Take the carried connection, once each side has proven the key to the other. Called by the greeting."""
        self.on_found(peer, peer.address)

    def on_refused(self, _who: str, reason: str) -> None:
        """Lose the coordinator, which does not prove the key, or has ended. Called by the greeting."""
        self._end(f"{self._the_coordinator} was lost: {reason}")

    def on_found(self, peer: Peer, found_as: str) -> None:
        """Take the connection to the coordinator, and send the first message. Called by the search.

        `found_as` is the name or address under which the coordinator was found.
        """
        self._report_search_at.cancel()
        self._peer = peer
        peer.received, peer.closed = self._on_message, self._on_closed
        self._note_message()  # its silence is measured from now on
        self._lease.begin()
        first_message = self._first_message(found_as)
        self._last_orders = OrderSequence(first_message)  # which orders may follow depends on what was said first
        peer.send(messages.encode(first_message))
        if self._how_lost:
            self._how_lost = ""
            self._loop.post(Waits(f"{self._name_with_address} is reached again"))

    def _first_message(self, found_as: str) -> messages.FirstMessage:
        """Return the first message on a new connection: a hello renews the lease, and says what this node has begun before."""
        first = self._elsewhere.first_message
        if not isinstance(first, messages.Hello):
            return first
        hello = replace(first, reached=host(found_as), at=self._renew_lease())
        last = self._last_orders
        if last is None:  # no coordinator was reached before
            return hello
        # was_left: that coordinator is gone, and other nodes may have begun a generation with it
        return replace(hello, last_generation=last.generation, last_term=last.term, run_id=last.run_id, was_left=True)

    # --- reports and orders

    def send(self, report: Report) -> None:
        """Report to the coordinator. While there is none, a report that this node stops ends this node."""
        # a failure of its workers is no reason of its own: it ends the generation on all nodes
        own_stop = report if isinstance(report, node.ReportStopping) and report.why is not Why.FAILED else None
        if own_stop is not None:
            self._reported_own_stop = own_stop
        if isinstance(report, NodeEnd):
            self._on_generation_ended_here(report)
            if self._first_node_probe is not None:
                self._first_node_probe.on_generation_ended()  # it need not watch the first node any longer
        if self._peer is not None:
            if not isinstance(report, node.Suspend | node.Resume):  # Ctrl-Z here does not suspend the whole job
                self._send(messages.fitted(report))
        elif own_stop is not None:
            self._end_as_stopped(own_stop)

    def _end_as_stopped(self, own_stop: node.ReportStopping) -> None:
        """End this node, which is to stop for a reason of its own while no coordinator knows of it."""
        status = exitcodes.of_signal(own_stop.signum) if own_stop.signum else exitcodes.NODE_LOST
        self.on_order(JobEnd(status=status, why=own_stop.why.value))

    @property
    def address(self) -> str | None:
        """The address that this node connects from, if the coordinator is elsewhere."""
        if self._first_node_probe is not None and self._first_node_probe.address is not None:
            return self._first_node_probe.address
        return self._peer.local_address or None if self._peer is not None else super().address

    def _on_message(self, payload: bytes) -> None:
        """Take an order, or answer a ping; a malformed message loses the coordinator. Called by the peer."""
        self._note_message()
        try:
            message = messages.for_agent(payload)
            if isinstance(message, Generation) and self._lease.is_over:
                # this process did not run when the lease ended: it begins nothing, and takes its leave
                self._check_lease()
                return
            if self._last_orders is not None:
                self._last_orders.check(message)
            if isinstance(message, messages.Ping):
                # `answered`: which renewal was the last to come there; the lease runs from when that was sent
                self._lease.extend(message.answered)
        except Malformed as error:
            self._end(f"{self._the_coordinator} was lost: the coordinator sent a malformed message ({error})")
            return
        match message:
            case messages.Ping(sent, host_limit):
                # without --heartbeat-timeout: as long a silence of its host as the coordinator allows the one here
                if self._elsewhere.keepalive.may_be_shorter:
                    self._silence.host_limit = min(host_limit, self._elsewhere.keepalive.timeout)
                self._send(messages.Pong(sent, self._renew_lease()))  # with the number of that renewal
            case messages.GivenUp(reason, may_return):
                self._on_given_up(reason, may_return=may_return)
            case messages.Ending(status):
                self._status_of_ending_job = status
            case messages.LeftByNode0(signum, why_unfit):
                self._on_left(signum, why_unfit)
            case Lead() | MeetAt():
                self._take_part_in_meeting(message)
            case Generation():
                if 0 < message.lease < self._lease.seconds:  # 0: as long as it is here
                    # the coordinator waits for the workers of this node only so long
                    self._lease.seconds = message.lease
                    self._schedule_lease_end()
                self.on_order(message)
            case _:  # dated by the clock here
                self.on_order(messages.as_received(message, self._loop.now()))

    def _renew_lease(self) -> float:
        """Note that a renewal of the lease is sent now, and return its number."""
        number = time.monotonic()
        self._lease.renew(number)
        self._schedule_lease_end()
        return number

    def _schedule_lease_end(self) -> None:
        """Set when the lease is over: this process kills the workers then, or, if it cannot, the front, its parent."""
        if self._lease.seconds < inf:
            left = self._lease.left
            self._check_lease_at.set(self._loop.now() + left)
            self._loop.handle(Leased(left))

    def _forget_lease(self) -> None:
        """Have no lease until a coordinator is reached: no worker lives any more, or all are killed now."""
        self._lease.begin()
        self._schedule_lease_end()

    def _send(self, message: messages.ToCoordinator) -> None:
        if self._peer is not None:
            self._peer.send(messages.encode(message))

    def _note_message(self) -> None:
        """Measure the silence of the coordinator from now on."""
        self._heard_at = self._loop.now()
        self._give_up_at.set(self._heard_at + self._silence.host_limit)

    # --- losing it

    def _on_closed(self, reason: str) -> None:
        """Lose a coordinator whose connection has ended; after a pause of this node, the reason is that. Called by the peer."""
        self._disconnect()
        when_paused = self._loop.clock.paused(self._elsewhere.keepalive.timeout)
        if not when_paused:
            self._lose_coordinator(self._loss_by(reason))
            return
        error = f"this node was {when_paused}, and {self._the_coordinator} was gone then: {reason}"
        news_while_waiting = f"{self._name_with_address} is lost: {reason}, while this node was {when_paused}"
        self._lose_coordinator(_Loss(error, news_while_waiting))

    def _on_given_up(self, reason: str, *, may_return: bool) -> None:
        """Lose a coordinator that goes on without this node; `may_return`: as a new node this one may come back to it."""
        when_paused = self._loop.clock.paused(self._elsewhere.keepalive.timeout)
        if when_paused and self._lease.seconds < inf:
            # kill the workers now: the clock of a simulated node's lease stands still while the machine is paused
            self._loop.handle(node.LeaseOver(self._loop.now()))
        error = f"{self._the_coordinator} was lost: it goes on without this node: {reason}"
        if when_paused:
            error = f"this node was {when_paused}, and {self._the_coordinator} goes on without this node: {reason}"
        if may_return:
            news_while_waiting = f"{self._name_with_address} goes on without this node: {reason}"
            self._lose_coordinator(_Loss(error, news_while_waiting, coordinator_goes_on=True))
        else:
            self._end(error)

    def _on_left(self, signum: int, why_unfit: str) -> None:
        """Lose a coordinator that leaves by a signal, is unfit, or has lost the command with which it was started."""
        if signum:
            leaves = f"leaves ({signal_name(signum)})"
            error = f"{self._the_coordinator} was lost: it {leaves}"
            self._lose_coordinator(_Loss(error, news_while_waiting=f"{self._name_with_address} {leaves}"))
        elif why_unfit:
            self._lose_coordinator(self._loss_by(f"its health check failed: {why_unfit}"))
        else:
            self._lose_coordinator(self._loss_by(ENDED_ITSELF))  # in words: "its ddplaunch has ended"

    def _check_lease(self) -> None:
        """Kill the workers if the lease is over; the coordinator is lost then. Called at that time, and first after a pause."""
        if not self._lease.is_over:
            self._schedule_lease_end()
            return
        self._loop.handle(node.LeaseOver(self._loop.now()))
        self._forget_lease()
        if self._peer is None:  # the coordinator was lost before
            return
        limit, when_paused = f"{self._lease.seconds:g} s", self._loop.clock.paused(self._lease.seconds)
        # it pings four times in half a lease: without any, it is silent; else it does not hear the answers, which renew the lease
        is_silent = self._loop.now() - self._heard_at > self._lease.seconds / 2
        if is_silent and not when_paused:
            self._lose_coordinator(self._loss_by(f"silent for {limit}{self._say_if_it_hears_nothing(self._peer)}"))
            return
        how = f"was {when_paused}" if when_paused else f"was not heard by {self._name_with_address} for {limit}"
        error = f"this node {how}, and other nodes may have gone on without it"
        self._lose_coordinator(_Loss(error, news_while_waiting=error, coordinator_goes_on=True))

    def _loss_by(self, reason: str) -> _Loss:
        """Return the loss of a coordinator for this reason, such as "connection closed"."""
        return _Loss(f"{self._the_coordinator} was lost: {reason}", f"{self._name_with_address} is lost: {reason}")

    def _lose_coordinator(self, loss: _Loss) -> None:
        """Wait for node 0, if it may come back to a job that was not to end; else end this node, as a job that is ending does."""
        if self._has_ended:
            return
        # so that a coordinator that lives knows why, and tells its user in these words: "here" is its own node
        self._send(Goodbye("has heard nothing from here for too long", has_ended=False))
        self._disconnect()
        if self._status_of_ending_job is not None and self._reported_own_stop is None:
            self._end(f"{loss.error}, while the job was being stopped", self._status_of_ending_job)
        elif not self._elsewhere.how_back:  # nothing brings node 0 back
            self._end(loss.error)
        elif self._reported_own_stop is not None:
            self._end_as_stopped(self._reported_own_stop)
        else:
            self._wait_for_return(loss)

    def _wait_for_return(self, loss: _Loss) -> None:
        """Stop the workers, which may save until the lease is over, and look for node 0 again when nothing of them is left."""
        now, within = self._loop.now(), duration(self._elsewhere.rdzv_timeout)
        self._how_lost = loss.news_while_waiting
        then = f"waiting up to {within} {self._elsewhere.how_back}"
        if loss.coordinator_goes_on:
            then = f"looking for {self._name_with_address} for up to {within}"
        self._give_up_at.set(now + self._elsewhere.rdzv_timeout)
        self._report_search_at.set(now + NEXT_NOTICE_AFTER)
        self._loop.handle(Waits(f"{self._how_lost}; {then}"))  # at once: before the stop that follows from it
        self._loop.post(node.StopOrdered(SIGTERM, now))
        generation_runs = self._last_orders is not None and self._last_orders.generation_runs
        if not generation_runs:  # else `_on_generation_ended_here` looks for node 0
            self._look_again()

    def _on_generation_ended_here(self, end: NodeEnd) -> None:
        """Note that nothing of the generation is left on this node; look for a coordinator that was lost meanwhile."""
        if self._last_orders is not None:
            self._last_orders.on_generation_ended()
        if not self._how_lost:
            return
        if end.leftovers:  # the next generation would run beside these processes
            leftovers = ", ".join(end.leftovers)
            self._end(f"{self._how_lost}, and processes are left here that could not be ended: {leftovers}")
        else:
            self._look_again()

    def _look_again(self) -> None:
        """Look for node 0 where it was."""
        self._forget_lease()
        self._search.begin(self._search.places, again_after=MAY_HAVE_MOVED_AFTER)

    def on_order(self, order: Order) -> None:
        """Take an order; after the end of the job nothing is waited for any more."""
        if isinstance(order, Generation):
            self._status_of_ending_job = None
        super().on_order(order)
        if self._has_ended:
            self._stop_waiting()

    def _take_part_in_meeting(self, order: Lead | MeetAt) -> None:
        """Be the first node of the generation that is to begin, or find out how its first node is reached."""
        if self._first_node_probe is None:
            from ddplaunch.launcher.job.probe import Probe  # where the coordinator is on none of the nodes

            self._first_node_probe = Probe(self._loop, self._elsewhere.key, self._elsewhere.keepalive, self)
        self._first_node_probe.on_order(order)

    def give_up(self) -> None:
        """Wait for the coordinator no longer."""
        super().give_up()
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        self._give_up_at.cancel()
        self._report_search_at.cancel()
        self._search.stop()

    def _report_search(self) -> None:
        """Post where this node looks for node 0, and why node 0 is not reached; again after NEXT_NOTICE_AFTER."""
        self._report_search_at.set(self._loop.now() + NEXT_NOTICE_AFTER)
        text = f"looking for {self._coordinator_name} at {self._searched_places} ({self._search.refusals.text})"
        self._search.refusals.expire()
        if self._how_lost:
            left = duration(round(self._give_up_at.at - self._loop.now()))
            text = f"{text}. Waiting up to {left} more {self._elsewhere.how_back}"
        self._loop.post(LookingForCoordinator(text))

    def _on_timeout(self) -> None:
        """Lose a coordinator that was silent for too long, or end this node if none was reached in time. Called by the loop."""
        if self._peer is None:
            self._give_up_search()
            return
        agent_silence = self._loop.now() - self._heard_at
        left = self._silence.seconds_left(agent_silence, self._peer.host_silence())
        if left > 0:  # its host was heard since its agent was
            self._give_up_at.set(self._loop.now() + left)
        else:
            reason = self._silence.describe(agent_silence) + self._say_if_it_hears_nothing(self._peer)
            self._lose_coordinator(self._loss_by(reason))

    def _give_up_search(self) -> None:
        """End this node, which has not reached the coordinator in time: never, or not again after it had lost the coordinator."""
        within = f"within {self._elsewhere.rdzv_timeout:g} s at {self._searched_places} ({self._search.refusals.text})"
        if self._how_lost:
            hint = "hint: type the commands of all nodes again. `--rdzv-timeout` sets how long they wait for node 0"
            self._end(f"{self._how_lost}, and node 0 was not reached again {within}\n\n{hint}")
            return
        hint = "is ddplaunch running on node 0, with the same address and token? Type `--node-rank` on all nodes or on none"
        if self._elsewhere.command_host:
            hint = f"can this node connect to {self._elsewhere.command_host}? A firewall may be between them"
        text = f"error: {self._coordinator_name} was not reached {within}\n\nhint: {hint}\n"
        # a node that only withdraws from the job knows by this `why` that nobody has heard it
        self.on_order(JobEnd(status=exitcodes.RENDEZVOUS, why="not_reached", text=text))

    def _say_if_it_hears_nothing(self, peer: Peer) -> str:
        """Say ", and hears nothing from here" of a silent coordinator if the kernel knows that; else ""."""
        agent = self._loop.now() - self._heard_at
        return describe_way(agent, peer.host_silence(), sends_in_vain=peer.sends_in_vain())

    @property
    def _coordinator_name(self) -> str:
        """Say what coordinates: "node 0", or "the command on login1"."""
        command_host = self._elsewhere.command_host
        return f"the command on {command_host}" if command_host else "node 0"

    @property
    def _the_coordinator(self) -> str:
        """Say which coordinator it is: "the coordinator (node 0)"."""
        return f"the coordinator ({self._coordinator_name})"

    @property
    def _name_with_address(self) -> str:
        """Say what coordinates, and node 0 with the address that was typed: "node 0 (gpu01)"."""
        if self._elsewhere.command_host or not self._search.places:
            return self._coordinator_name
        host, _port = self._search.places[0]
        return f"{self._coordinator_name} ({host})"

    @property
    def _searched_places(self) -> str:
        """Say where the coordinator is looked for: "gpu01, ports 29400 to 29409"."""
        hosts = dict.fromkeys(f"[{name}]" if ":" in name else name for name, _ in self._search.places)
        ports = sorted({port for _, port in self._search.places})
        return f"{', '.join(hosts)}, " + (f"ports {ports[0]} to {ports[-1]}" if len(ports) > 1 else f"port {ports[0]}")

    def _disconnect(self) -> None:
        """Follow no coordinator, until one is reached again."""
        if self._peer is not None:
            self._peer.close()
            self._peer = None
        self._give_up_at.cancel()

    def _end(self, error: str, status: int = exitcodes.NODE_LOST) -> None:
        """End this node, which has lost the coordinator for good."""
        self.on_order(JobEnd(status=status, why="lost", text=f"error: {error}\n"))

    @property
    def is_waiting(self) -> bool:
        """Whether node 0 was lost and is waited for, so that this node alone can answer for itself."""
        return bool(self._how_lost)

    @property
    def has_begun(self) -> bool:
        """Whether the coordinator that there is has begun a generation here."""
        return self._last_orders is not None and self._last_orders.has_begun_one

    def close(self) -> None:
        """Close all that is open."""
        self._loop.after_pause = lambda: None
        self._forget_lease()
        if self._first_node_probe is not None:
            self._first_node_probe.close()
        self._stop_waiting()
        self._disconnect()
