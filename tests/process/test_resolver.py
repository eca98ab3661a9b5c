"""Looking up host names beside the loop: answers, a lookup that hangs, and a child that nobody misses or finds."""

import errno
import os
import posix
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.net.addresses import Answer, Resolver
from ddplaunch.system.process.tree import children, ends_within, look, reap
from tests.conftest import PATIENCE, descriptors, until

NONE = "the lookup was killed, or could not be started"
V4 = (socket.AF_INET, ("127.0.0.1", 0))
# an owner whose lookup never ends: it says who its child is, and goes on when told to by a line on its stdin
OWNER = """
import socket, signal, sys
real = socket.getaddrinfo
def hang(host, *args, flags=0, **more):
    if flags:
        return real(host, *args, flags=flags, **more)
    signal.pause()
socket.getaddrinfo = hang
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.net.addresses import Resolver
loop = Loop()
resolver = Resolver(loop, "localhost", print)
print(*loop.asked_pids, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def loop():
    loop = Loop()
    yield loop
    assert not loop.asked_pids
    loop.close()


def child_of(loop: Loop) -> int | None:
    """The pid of the child that looks up, if there is one."""
    return next(iter(loop.asked_pids), None)


@pytest.fixture(autouse=True)
def nothing_left_and_signals_as_before():
    fds = descriptors()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    before = set(children(os.getpid()))
    yield
    assert signal.pthread_sigmask(signal.SIG_SETMASK, blocked) == blocked
    assert not [pid for pid in set(children(os.getpid())) - before if is_resolver(pid)]
    assert descriptors() == fds


def is_resolver(pid: int) -> bool:
    """Whether it is a copy of this process, dead or alive."""
    process, us = look(pid), look(os.getpid())
    return process is not None and us is not None and process.name == us.name


@pytest.fixture
def hanging(monkeypatch):
    """Every lookup of a name takes for ever, as with a name server that is silent."""
    real = socket.getaddrinfo

    def hang(host, *args, flags=0, **more):
        if flags & socket.AI_NUMERICHOST:
            return real(host, *args, flags=flags, **more)
        signal.pause()  # no signal gets through, so it never returns
        raise AssertionError

    monkeypatch.setattr(socket, "getaddrinfo", hang)


def turn(loop: Loop, answers: Sequence[object]) -> None:
    """Run the loop until there is an answer."""
    ends = loop.timer(loop.now() + PATIENCE, lambda: None)
    while not answers:
        assert ends.is_set, "no answer"
        loop.run_once()
    ends.cancel()


def ask(loop: Loop, host: str) -> Answer:
    """Look up, and give the answer, of which there is one alone."""
    answered: list[Answer] = []
    resolver = Resolver(loop, host, answered.append)
    turn(loop, answered)
    assert len(answered) == 1
    assert child_of(loop) is None
    resolver.close()
    return answered[0]


# --- answers


def test_a_name_is_found_in_a_child(loop):
    answered = []
    Resolver(loop, "localhost", answered.append)
    assert not answered
    assert child_of(loop) in children(os.getpid())
    turn(loop, answered)
    (answer,) = answered
    assert (answer.host, answer.error) == ("localhost", "")
    assert V4 in answer.targets


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("127.0.0.1", V4),
        ("203.0.113.7", (socket.AF_INET, ("203.0.113.7", 0))),
        ("2001:db8::7", (socket.AF_INET6, ("2001:db8::7", 0, 0, 0))),
        ("fe80::7%lo", (socket.AF_INET6, ("fe80::7", 0, 0, 1))),
    ],
)
def test_a_numeric_address_is_answered_at_once_without_a_child(loop, hanging, address, target):
    answered = []
    Resolver(loop, address, answered.append)
    assert answered == [Answer(address, (target,))]
    assert child_of(loop) is None


def test_a_name_that_nobody_knows_is_an_error_in_the_words_of_getaddrinfo(loop):
    with pytest.raises(socket.gaierror) as known:
        socket.getaddrinfo("nobody.invalid", 1)
    assert ask(loop, "nobody.invalid") == Answer("nobody.invalid", (), str(known.value.strerror))


@pytest.mark.parametrize("name", ["ä..b", "x" * 300, "ä" * 300, "\udcff", "::g", "127.0.0.1 x", ""], ids=ascii)
def test_what_cannot_be_a_name_is_an_error(loop, name):
    answer = ask(loop, name)
    assert answer.host == name
    assert answer.targets == ()
    assert answer.error


def test_an_address_that_is_found_twice_is_given_once(loop, monkeypatch):
    """As when it stands twice in /etc/hosts."""
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: 2 * real(*args, **more))
    answer = ask(loop, "localhost")
    assert answer.targets.count(V4) == 1


def test_an_answer_larger_than_a_pipe_arrives_whole(loop, monkeypatch):
    many = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"10.{n >> 8}.{n & 255}.1", 0)) for n in range(5000)]

    def find(*_, flags=0, **__):
        if flags:
            raise socket.gaierror(socket.EAI_NONAME, "it is a name")
        return many

    monkeypatch.setattr(socket, "getaddrinfo", find)
    answer = ask(loop, "many")
    assert answer.targets == tuple((family, (address, 0)) for family, _, _, _, (address, _) in many)


# --- a lookup that hangs


def test_a_lookup_under_way_is_ended_by_close_and_never_answered(loop, hanging):
    answered = []
    resolver = Resolver(loop, "localhost", answered.append)
    child = child_of(loop)
    assert child is not None
    loop.post(None)
    loop.run_once()
    assert not answered
    began = time.monotonic()
    resolver.close()
    assert time.monotonic() - began < 60
    assert look(child) is None
    assert child_of(loop) is None
    resolver.close()
    assert not answered


def test_who_does_not_end_is_waited_for_so_long_and_not_reaped():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        assert not ends_within(child.pid, 0.05)
        assert child.stdin is not None
        child.stdin.close()
        assert ends_within(child.pid, PATIENCE)
        assert ends_within(child.pid, 0)
        assert child.wait() == 0
        assert ends_within(child.pid, 0)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTSTP])
def test_signals_that_are_not_meant_for_the_child_do_not_reach_our_handlers_through_it(loop, hanging, signum):
    """The wakeup descriptor is shared with it, and what is written there would count as our signal."""
    ours, wakeup = os.pipe()
    os.set_blocking(ours, False)
    os.set_blocking(wakeup, False)
    before = signal.signal(signum, lambda *_: None)
    old = signal.set_wakeup_fd(wakeup)
    try:
        resolver = Resolver(loop, "localhost", lambda _: None)
        assert child_of(loop) is not None
        os.kill(child_of(loop), signum)
        until(lambda: waits_for_nothing_but_kill(child_of(loop)), "the signal to be pending")
        with pytest.raises(BlockingIOError):
            os.read(ours, 1)
        resolver.close()
    finally:
        signal.set_wakeup_fd(old)
        signal.signal(signum, before)
        os.close(ours)
        os.close(wakeup)


def waits_for_nothing_but_kill(pid: int | None) -> bool:
    """Whether a signal is pending that the process will not take (proc_pid_status(5))."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return bool((int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)) & int(fields["SigBlk"], 16))


def test_a_child_that_was_killed_is_an_error(loop, hanging):
    answered = []
    Resolver(loop, "localhost", answered.append)
    assert child_of(loop) is not None
    os.kill(child_of(loop), signal.SIGKILL)
    turn(loop, answered)
    assert answered == [Answer("localhost", (), NONE)]


def test_the_child_dies_with_its_owner():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdin is not None
    child = int(owner.stdout.readline())
    assert look(child) is not None
    owner.kill()
    owner.wait()
    owner.stdin.close()
    owner.stdout.close()
    try:
        until(lambda: (process := look(child)) is None or process.state in "ZX", "the child to die")
    except AssertionError:
        os.kill(child, signal.SIGKILL)
        raise


# --- a child of an agent


def test_the_child_holds_nothing_that_is_ours(loop, hanging):
    """Else a port that we let go of would stay taken, and a pipe that we close would have no end."""
    reading, writing = os.pipe()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = server.getsockname()
        resolver = Resolver(loop, "localhost", lambda _: None)
        until(lambda: len(os.listdir(f"/proc/{child_of(loop)}/fd")) <= 4, "the child to let go")
    with socket.socket() as other:
        other.bind(address)
    os.close(writing)
    assert os.read(reading, 1) == b""
    os.close(reading)
    resolver.close()


def test_an_owner_that_reaps_other_children_leaves_this_one_to_us(loop):
    answered = []
    Resolver(loop, "localhost", answered.append)
    child = child_of(loop)
    assert child is not None
    assert child in children(os.getpid())
    until(lambda: (process := look(child)) is not None and process.state == "Z", "the child to end")
    reap(keep={child, *(pid for pid in children(os.getpid()) if not is_resolver(pid))})
    turn(loop, answered)
    assert V4 in answered[0].targets


def test_the_answered_may_close_and_ask_again(loop):
    answered = []
    resolvers = []

    def again(answer):
        resolvers[0].close()
        Resolver(loop, "localhost", answered.append)
        assert answer.targets

    resolvers.append(Resolver(loop, "localhost", again))
    turn(loop, answered)
    assert V4 in answered[0].targets


@pytest.mark.parametrize("call", ["fork", "pipe2"])
def test_without_room_for_a_process_the_answer_is_there_at_once_and_an_error(loop, monkeypatch, call):
    def refuse(*_):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(posix if call == "fork" else os, call, refuse)
    answered = []
    Resolver(loop, "localhost", answered.append)
    assert child_of(loop) is None
    assert answered == [Answer("localhost", (), NONE)]


WAITER = """
import socket, sys
real = socket.getaddrinfo
def hang(host, *args, flags=0, **more):
    if not flags:
        open(sys.argv[1]).read()
    return real(host, *args, flags=flags, **more)
socket.getaddrinfo = hang
from ddplaunch.system.net.addresses import look_up
print(look_up("localhost", lambda: print("slow", flush=True)).targets)
"""


def test_who_waits_for_a_name_without_a_loop_is_told_once_that_it_takes_long(tmp_path):
    silent = tmp_path / "name server"
    os.mkfifo(silent)
    with subprocess.Popen([sys.executable, "-c", WAITER, silent], text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == "slow\n"
        silent.write_text("it answers")
        out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert "127.0.0.1" in out
    assert "slow" not in out
