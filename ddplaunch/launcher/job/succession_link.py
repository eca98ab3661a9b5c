"""The link of an agent whose job goes on when its coordinator is lost: to the next one, or to a coordinator that takes over here.

A node that has lost the coordinator stops its workers and looks for the nodes before it, in the order in which they take over. If
none of them is left, it takes over itself; `launcher.decide.electorate` says whether it may go on.
"""

from __future__ import annotations

from math import inf
from signal import SIGTERM
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.decide.job import SELF_ID
from ddplaunch.launcher.decide.job.succession import AT_ONCE
from ddplaunch.launcher.job import messages
from ddplaunch.launcher.job.orders import (
    Coordinates,
    CoordinatorLost,
    Follows,
    Generation,
    Moved,
    NodeEnd,
    Retired,
    TookOver,
)
from ddplaunch.launcher.job.remote_link import CONNECTION_REFUSED, FIRST_NOTICE, LEAVES, RemoteLink
from ddplaunch.reach.channel.dialer import target
from ddplaunch.reach.channel.peer import endpoint_of, host_of
from ddplaunch.reach.silence import seconds_to_look
from ddplaunch.spec.outcome import OWN_END, Why
from ddplaunch.system.net.addresses import is_loopback
from ddplaunch.system.net.port import listen

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.launcher.job.coordinator import Coordinator
    from ddplaunch.launcher.job.link import JoinRequest, Link
    from ddplaunch.launcher.job.orders import Order, Report
    from ddplaunch.launcher.job.redirector import Redirector
    from ddplaunch.launcher.tell.reporter import Reporter
    from ddplaunch.reach.channel.dialer import Target
    from ddplaunch.reach.channel.peer import Peer
    from ddplaunch.system.loop.loop import Loop

# seconds in which a node before this one takes over: it may notice the loss a heartbeat later; one more for each before it
PATIENCE = 2.0
_AGAIN = 1.0  # seconds from one look whether the nodes of the coordinator that was lost are here to the next
_BACK = 5.0  # seconds until a node that was sent elsewhere, and reaches nobody there, looks where it looked before


class SuccessionLink(RemoteLink):
    """The link of an agent to whichever coordinator there is."""

    def __init__(
        self, request: JoinRequest, hello: Callable[[str], messages.Hello], loop: Loop, reporter: Reporter
    ) -> None:
        """Prepare to look for the coordinator, and listen for the others, should this node take over."""
        rendezvous = request.rendezvous
        self._listening = listen(rendezvous.source or _where_to_listen(rendezvous.listen), (0,))
        self._request = request
        self._reporter = reporter
        self._first_hello = hello
        self._succession: messages.Succession | None = None
        self._since = 0.0
        self._is_spare = False
        self._begun: Generation | None = None
        self._end_of_node: NodeEnd | None = None  # of that generation, as reported
        self.stop_ordered: node.StopOrdered | None = None  # of that generation, as ordered
        self._failed_at = inf  # when it was reported that a worker of this node has failed in that generation
        self._stopping: node.ReportStopping | None = None  # that this node is to end, as reported
        self._lost = ""  # the coordinator, while none is followed
        self._lost_address = ""  # of the connection to it
        self._lost_has_ended = False
        self._left = False  # it did so by a signal
        self._old: Target | None = None  # where that coordinator was, unless it is known to have ended
        self._was_moved = False  # by a coordinator that was started when the job had another already
        self._retired: Coordinator | None = None  # that was here until it learned that the job goes on elsewhere
        self._redirector: Redirector | None = None  # while the coordinator is here, and was elsewhere before
        # until when a coordinator that was lost cannot have gone on without this node, and have ended, by its endpoint
        self._lost_until: dict[str, float] = {}
        self._gone: set[str] = set()  # endpoints at which nobody listens any more
        self._ended: set[str] = set()  # of these, those whose agents ended at once
        super().__init__(
            loop,
            key=request.key,
            hello=self._next_hello,
            source=rendezvous.source,
            heartbeat_timeout=request.spec.heartbeat_timeout,
            may_shorten_silence=request.spec.may_shorten_silence,
            rdzv_timeout=request.spec.rdzv_timeout,
        )
        if not request.allocation.start:
            self._without_front = OWN_END
        self._take_over_at = loop.timer(None, self._take_over)
        self._give_up_at = loop.timer(None, self._give_up)
        self._redirect_at = loop.timer(None, self._redirect)

    def _next_hello(self, reached: str) -> messages.Hello:
        """Return the first message to a coordinator: after another was lost, with the part that this node had."""
        hello = replace(self._first_hello(reached), listens=self._listening.getsockname()[1])
        if self._was_moved:
            hello = replace(hello, requested_rank=None)
        if not self._lost or self._succession is None:
            return hello
        return replace(
            hello,
            requested_rank=None,
            run_id=self._succession.run_id,
            votes=self._succession.votes,
            secrets=self._succession.secrets,
            runs=self._running,
            stop=self.stop_ordered,
        )

    @property
    def _running(self) -> messages.Running | None:
        """The part of this node in the last generation, if it has begun that; its end follows."""
        begun = self._begun
        if begun is None or begun.agreed is None:
            return None
        return messages.Running(begun.number, begun.agreed.index)

    # --- while there is a coordinator

    def _on_succession(self, succession: messages.Succession) -> None:
        if self._lost and self.coordinator is None:
            self._loop.post(Follows(f"{succession.host} has taken over"))
        is_spare = self._request.spec.spares > 0 and not succession.votes
        if is_spare and not self._is_spare:
            self._loop.post(Follows("this node is a spare: it waits until a node is lost or leaves"))
        self._is_spare = is_spare
        self._succession, self._since = succession, self._loop.now()
        self.coordinator_host = succession.host
        self._begin(None)
        self._found()

    def _begin(self, order: Generation | None) -> None:
        """Forget what was of the last generation."""
        self._begun, self._end_of_node, self.stop_ordered, self._failed_at = order, None, None, inf

    def _on_ended(self, votes: messages.Votes) -> None:
        if self._succession is not None:
            self._succession = self._succession.without(votes)

    def _found(self) -> None:
        """Forget the coordinator that was lost, since there is another."""
        self._lost, self._left, self._gone, self._ended, self._lost_until = "", False, set(), set(), {}
        self._give_up_at.cancel()

    def lead(self, coordinator: Coordinator) -> Link:
        """Look for no coordinator, since the first one is here; return this link to it."""
        self._stop_waiting()
        self.coordinator = coordinator
        return self

    def _follow(self, place: Moved) -> None:
        """Look for the coordinator that had the job already when the one before, which may be here, was started."""
        if self._begun is not None or self._has_ended:
            return
        self._disconnect()
        if self.coordinator is not None:
            self._retired, self.coordinator = self.coordinator, None
            self._loop.post(Retired())
        self._was_moved, self._succession = True, None
        self._queries = self._queries or ((place.address, place.port),)
        self._meet(_BACK)
        self._dialer.set_targets([target(place.address, place.port)])

    def _meet(self, again_in: float) -> None:
        """Look for a coordinator as at first; for that at the job's endpoint in so many seconds."""
        now = self._loop.now()
        self._lost_at.set(now + self._rdzv_timeout)
        self._notice_at.set(now + FIRST_NOTICE)
        self._resolve_at.set(now + again_in)

    def take(self, order: Order) -> None:
        """Take an order of the coordinator, be it here or elsewhere."""
        if isinstance(order, Moved):
            self._follow(order)
            return
        if isinstance(order, Generation) and self._succession is not None:
            if self._lost and self.coordinator is not None:
                self._loop.post(Coordinates())
            self._begin(order)
            self._known_at = max(self._known_at, self._acknowledged_at)
            # all nodes have acknowledged the last electorate: the one before decides nothing any more
            self._succession = self._succession.as_begun()
            self._found()
            self._dialer.stop()
            self._redirect()
        elif isinstance(order, node.StopOrdered):
            self.stop_ordered = order
        super().take(order)
        if isinstance(order, Generation) and self._stopping is not None:
            self.send(self._stopping)  # to a coordinator that has not known, or knew it of an earlier generation

    def _redirect(self) -> None:
        """Send nodes that look for node 0 to the coordinator here, if it was elsewhere before and goes on or waits for nodes."""
        state = self.coordinator.state if self.coordinator is not None else None
        if state is not None and state.succession.gather_until is not None:
            self._redirect_at.set(self._loop.now() + _AGAIN)
            return
        if (
            state is None
            or state.end.status is not None
            or self._redirector is not None
            or not state.policy.replaceable
        ):
            return
        from ddplaunch.launcher.job.redirector import Redirector  # imported by `join.prepare`

        own = self._next_hello("")
        found = messages.GoesOn(own.host, own.listens)
        self._redirector = Redirector(self._request, found, self._loop, self._reporter.print)

    def send(self, report: Report) -> None:
        """Report to the coordinator; while there is none, keep how the workers of this node have ended."""
        match report:
            case node.ReportStopping(Why.FAILED) if self._lost:
                return  # all workers are being stopped, and the end of the node says which have failed
            case node.ReportStopping(Why.FAILED):
                self._failed_at = self._loop.now()
            case NodeEnd():
                self._end_of_node = report
            case node.ReportStopping(why) if why is not Why.FAILED:
                self._stopping = report
        if self.coordinator is not None:
            self.coordinator.take(SELF_ID, report)
        else:
            super().send(report)

    # --- while there is none

    def _lose_coordinator(self, reason: str, *, has_ended: bool) -> None:
        succession = self._succession
        if succession is None and self._queries and not self._has_ended and not self._request.allocation.has_one_screen:
            self._disconnect()  # nothing has begun, and somebody may start node 0 again
            self._loop.handle(Follows(f"node 0 is lost: {reason}. Looking for it again"))
            self._meet(0.0)
            return
        if succession is None or self._has_ended:
            super()._lose_coordinator(reason, has_ended=has_ended)
            return
        if not has_ended:
            self._send(messages.Deserted())
        self._disconnect()
        if self._stopping is not None:  # this node was to leave, or to end the job
            super().send(self._stopping)
            return
        now, reached = self._loop.now(), self._dialer.reached
        if reached is not None:
            self._lost_until[endpoint_of(reached[1])] = self._known_at + AT_ONCE
        if not self._lost:
            if (
                self._heard_at > self._failed_at and self.stop_ordered is None
            ):  # it lived, and workers were not lost with it
                self.stop_ordered = node.StopOrdered(SIGTERM, now, Why.FAILED)
            self._lost, self._lost_has_ended = f"node 0 ({succession.host}): {reason}", has_ended
            self._lost_address = "" if reached is None else host_of(reached[1])
            self._old = None if has_ended else reached
            self._loop.handle(  # reported ahead of who takes over
                CoordinatorLost(f"{self._how_lost()}. Looking for the node that takes over")
            )
            self._loop.post(node.StopOrdered(SIGTERM, now))  # which means nothing where no worker runs
        elif has_ended and reached == self._old and reached is not None:
            self._old, self._lost_has_ended = None, self._has_ended_at_once(endpoint_of(reached[1]))
        self._give_up_at.set(now + seconds_to_look(self._heartbeat_timeout))
        self._look_for_successor()

    def _wake_without(self, when: str, reason: str) -> None:
        # a coordinator that has dropped this node has said so before
        self._lose_coordinator(f"{reason}, while this node was {when}", has_ended=False)

    def _how_lost(self, which: str = "") -> str:
        """Say how the coordinator was lost, or that it leaves."""
        who, _, how = self._lost.partition(": ")
        return f"{who}{which} {how.removeprefix('it ') if how.startswith(LEAVES) else f'is lost: {how}'}"

    @property
    def _position(self) -> int | None:
        """How many nodes take over before this one; None: this one does not."""
        assert self._succession is not None
        found = (at for at, one in enumerate(self._succession.candidates) if one.votes == self._succession.votes)
        return next(found, None)

    def _before(self) -> tuple[messages.Candidate, ...]:
        """Return the nodes that take over before this one, but for those that are gone."""
        assert self._succession is not None
        candidates, position = self._succession.candidates, self._position
        own = None if position is None else _endpoint(candidates[position])  # it may be there twice, if it came again
        return tuple(one for one in candidates[:position] if _endpoint(one) not in {*self._gone, own})

    def _look_for_successor(self) -> None:
        """Look for the nodes that take over before this one; if there is none, take over."""
        before, silent = self._before(), [self._old] if self._old is not None else []
        self.aim_at(before, *silent)
        if before:
            if self._position is not None:
                self._take_over_at.set(self._loop.now() + PATIENCE + self._position)
        elif self._position is not None:
            self._take_over()
        elif not silent:
            self._give_up()

    def _on_refused(self, where: str, reason: str) -> None:
        super()._on_refused(where, reason)
        if not self._lost or reason != CONNECTION_REFUSED or where in self._gone:
            return
        self._gone.add(where)
        if has_ended := self._has_ended_at_once(where):
            self._ended.add(where)
        if self._old is not None and where == endpoint_of(self._old[1]):
            self._old, self._lost_has_ended = None, has_ended
            if self.coordinator is not None and has_ended:
                self.coordinator.last_one_ended()
        if self.coordinator is None:
            self._look_for_successor()

    def _has_ended_at_once(self, where: str) -> bool:
        """Return whether a coordinator that has ended at this endpoint cannot have gone on without this node before.

        Only one that this node has followed: another may have lost that one long ago, and have gone on with others.
        """
        return self._loop.now() <= self._lost_until.get(where, 0.0) and not self._loop.clock.paused(AT_ONCE)

    def _on_handed_over(self, signum: int, unfit: str) -> None:
        self._left = signum != 0
        super()._on_handed_over(signum, unfit)

    def _on_anew(self) -> None:
        """Look elsewhere; the coordinator that was lost has ended, if another one listens in its place."""
        reached = self._dialer.reached
        self._disconnect()
        if reached is not None and reached == self._old:
            self._old, self._lost_has_ended = None, self._has_ended_at_once(endpoint_of(reached[1]))
        elif reached is not None:
            self._gone.add(endpoint_of(reached[1]))
        self._look_for_successor()

    def _take_over(self) -> None:
        """Be the coordinator. As long as it has not begun, a node before this one may still take over."""
        from ddplaunch.launcher.job.listen import Inheritance, take_over  # imported by `join.prepare`

        assert self._succession is not None
        self._stop_timers()
        candidates = self._succession.candidates
        inheritance = Inheritance(
            succession=self._succession,
            since=self._since,
            past=self._begun,
            lost=self._lost,
            lost_address=self._lost_address,
            lost_has_ended=self._lost_has_ended,
            left=self._left,
            ended=tuple(one for one in candidates if _endpoint(one) in self._ended),
            refused=tuple(one for one in candidates if _endpoint(one) in self._gone - self._ended),
            listening=self._listening.dup(),
        )
        hello = self._next_hello(candidates[self._position or 0].address)
        self.coordinator = take_over(self._request, inheritance, hello, self._loop, self._reporter, self.take)
        # ahead of all events that wait: with how the workers have ended, the job goes on or ends, and this node reports that
        self._loop.handle(TookOver(f"{hello.host} takes over from {self._how_lost(', which')}"))
        if self._end_of_node is not None:
            self.coordinator.take(SELF_ID, self._end_of_node)
        self._redirect()

    def _on_opened(self, peer: Peer) -> None:
        """Follow this coordinator, unless this node has taken over, and has enough nodes to go on or has ended."""
        if self.coordinator is not None and self.coordinator.state.succession.gather_until is None:
            peer.close()
            return
        self._stop_timers()
        if self.coordinator is not None:
            state = self.coordinator.state
            if state.end.halted and state.why is Why.SIGNALLED:
                self.stop_ordered = node.StopOrdered(state.signum, self._loop.now(), Why.SIGNALLED)
            self.coordinator.desert()
            self.coordinator = None
        super()._on_opened(peer)
        if self._lost and self._end_of_node is not None:
            super().send(self._end_of_node)
        if self._stopping is not None:
            super().send(self._stopping)

    def _give_up(self) -> None:
        text = self._how_lost().replace(" is lost: ", " was lost: ", 1)
        self._lose(f"{text}\n\nhint: no node that could take over was reached")

    def _stop_waiting(self) -> None:
        super()._stop_waiting()
        self._stop_timers()

    def _stop_timers(self) -> None:
        """Neither take over any more, nor give up: a coordinator is here, or is reached, or the job has ended."""
        self._take_over_at.cancel()
        self._give_up_at.cancel()

    def close(self) -> None:
        """Close all that is open."""
        for part in (self.coordinator, self._retired, self._redirector):
            if part is not None:
                part.close()
        super().close()
        self._redirect_at.cancel()
        self._listening.close()


def _where_to_listen(of_node_0: str | None) -> str | None:
    """Return the numeric address at which this node waits for the others, should it take over; None: all.

    `of_node_0` is that at which node 0 listens: another host does not have it, unless all nodes are on this one.
    """
    return of_node_0 if of_node_0 is not None and is_loopback(of_node_0) else None


def _endpoint(candidate: messages.Candidate) -> str:
    return endpoint_of(target(candidate.address, candidate.port)[1])
