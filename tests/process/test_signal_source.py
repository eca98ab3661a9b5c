"""Signals that come to an agent and its front at once, in the order in which Slurm sends them."""

import os
import signal
from collections.abc import Iterator

import pytest

from ddplaunch.launcher.decide import node
from ddplaunch.launcher.node.signals import SignalSource
from ddplaunch.reach.pipes import FrontPipes
from tests.loops import FakeLoop

TAKEN = (signal.SIGTERM, signal.SIGCONT, signal.SIGCHLD, signal.SIGURG)


@pytest.fixture
def pipes() -> Iterator[FrontPipes]:
    """Both sides in one process, which takes signals as before when the test has ended."""
    handlers = {signum: signal.getsignal(signum) for signum in TAKEN}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    pipes = FrontPipes.make()
    yield pipes
    os.close(signal.set_wakeup_fd(-1))
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for fd in (*pipes.signals, *pipes.requests, *pipes.replies, pipes.lease):
        os.close(fd)
    for sock in (*pipes.output, *pipes.spared):
        sock.close()


def test_what_the_cluster_sends_to_all_is_known_as_such_even_if_it_comes_while_the_front_is_listened_to(
    pipes: FrontPipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slurmd sends SIGCONT before SIGTERM: the second one may come while the first one is being taken."""
    loop = FakeLoop()
    source = SignalSource(loop, pipes, stops=frozenset({signal.SIGTERM}), end_within=60, cluster_signals_all=True)
    source.listen({signal.SIGTERM})
    real, coming = os.read, [signal.SIGTERM]

    def read(fd: int, size: int) -> bytes:
        if fd == pipes.signals[0] and coming:
            signum = coming.pop()
            os.kill(os.getpid(), signum)
            pipes.pass_on(signum)
        return real(fd, size)

    pipes.pass_on(signal.SIGCONT)
    monkeypatch.setattr(os, "read", read)
    for _ in range(2):
        loop.turn()
    os.close(source._own_signals_fd)
    came = [event for event in loop.events if isinstance(event, node.SignalReceived) and event.signum == signal.SIGTERM]
    assert [(event.by_cluster, event.is_copy) for event in came] == [(True, False), (False, True)]
