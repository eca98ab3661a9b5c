"""The hosts that the other tests here stand on: that they are apart, that faults look as they should, and that all goes."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import PATIENCE, until
from tests.hosts import proc
from tests.hosts.bed import UPTIME, Bed
from tests.hosts.faults import Faults
from tests.hosts.host import Command

PYTHON = [sys.executable, "-I", "-S"]
ECHO = Path(__file__).parent / "echo.py"


def line_of(command: Command) -> str:
    """The next line that a program writes."""
    assert command.stdout is not None
    return command.stdout.readline().decode().strip()


class Conversation:
    """A TCP connection between programs on two hosts."""

    def __init__(self, bed: Bed, stack: ExitStack, one: str, other: str, address: str | None = None) -> None:
        self.server = stack.enter_context(bed.start(other, [*PYTHON, ECHO, "serve"], stdout=subprocess.PIPE))
        ask = [*PYTHON, ECHO, "ask", address or other, line_of(self.server)]
        self.client = stack.enter_context(bed.start(one, ask, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        self.address = line_of(self.client)

    def exchange(self, size: int = 5, patience: float = PATIENCE) -> str:
        """Send so many bytes and tell what came of it."""
        assert self.client.stdin is not None
        self.client.stdin.write(f"{size} {patience}\n".encode())
        self.client.stdin.flush()
        return line_of(self.client)

    def echoes(self, size: int = 5) -> None:
        """Send so many bytes, and have all that was ever sent back unharmed, however late."""
        self.seconds(size)

    def seconds(self, size: int = 5) -> float:
        """Send so many bytes, have them back unharmed, and tell how long it took."""
        word, seconds = self.exchange(size).split()
        assert word == "same"
        return float(seconds)


@pytest.fixture
def connect() -> Iterator[Callable[..., Conversation]]:
    """Connect two hosts by TCP."""
    with ExitStack() as stack:
        yield lambda bed, one, other, address=None: Conversation(bed, stack, one, other, address)


# --- hosts


def pipes() -> dict[str, int]:
    return {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


# --- faults


def test_lag_delays_each_way_and_unlag_ends_it(bed, connect):
    conversation = connect(bed, "node0", "node1")
    bed.lag("node1", 20)
    assert conversation.seconds(500_000) > 0.04
    bed.lag("node1", 1500)
    assert conversation.seconds() >= 3
    assert connect(bed, "node2", "node0").seconds() < 3
    bed.unlag("node1")
    assert conversation.seconds() < 3


def test_lost_packets_are_lost(bed, connect):
    conversation = connect(bed, "node0", "node1")
    bed.lag("node1", 0, loss_percent=100)
    assert conversation.exchange(patience=0.3) == "silence"
    bed.lag("node1", 1, loss_percent=5)
    connect(bed, "node2", "node1").echoes(200_000)


def test_a_lagging_host_can_be_cut_and_lose_its_power(bed, connect):
    bed.lag("node1", 1)
    conversation = connect(bed, "node0", "node1")
    bed.cut("node1")
    bed.join("node1")
    conversation.echoes()
    bed.power_cut("node1")
    assert conversation.exchange(patience=0.3) == "silence"
    bed.boot("node1")
    connect(bed, "node0", "node1").echoes()


# --- faults of each way between two hosts


MANY = 200

RECEIVER = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
    receiver.setsockopt(socket.SOL_SOCKET, 33, 1 << 22)  # SO_RCVBUFFORCE: all of them find room
    receiver.bind(("", 4242))
    print("ready", flush=True)
    while (word := receiver.recv(100)) != b"end":
        print(word.decode(), flush=True)
"""
SENDER = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    for word in sys.argv[2:]:
        sender.sendto(word.encode(), (sys.argv[1], 4242))
"""


def send(bed: Bed, source: str, target: str, *words: object) -> None:
    """Send datagrams."""
    bed.run(source, [*PYTHON, "-c", SENDER, bed.address(target), *words]).check_returncode()


@pytest.fixture
def sent(bed, faults, connect):
    """Send many datagrams through the faults there are, then one without any; return those that have come before that."""
    connect(bed, "node0", "node1").echoes()  # from now on they know where they are

    def sent(source: str, target: str) -> list[int]:
        with bed.start(target, [*PYTHON, "-c", RECEIVER], stdout=subprocess.PIPE) as receiver:
            assert line_of(receiver) == "ready"
            send(bed, source, target, *range(MANY))
            time.sleep(0.3)  # those that are late come
            faults.heal()
            send(bed, source, target, "end")
            return [int(line) for line in receiver.stdout]

    return sent


def test_without_faults_all_comes_in_order(sent):
    assert sent("node0", "node1") == [*range(MANY)]


def test_one_way_is_cut_and_the_other_is_not(faults, sent):
    faults.cut("node0", "node1")
    assert sent("node0", "node1") == []
    faults.cut("node0", "node1")
    assert sent("node1", "node0") == [*range(MANY)]


def test_hosts_that_are_parted_hear_nothing_of_each_other_until_they_are_healed(faults, sent):
    for source, target in (("node0", "node1"), ("node1", "node0")):
        faults.part(["node0", "node2"], ["node1"])
        assert sent(source, target) == []
        assert sent(source, target) == [*range(MANY)]


def test_some_frames_are_lost(faults, sent):
    faults.everywhere(loss=50)
    found = sent("node0", "node1")
    assert MANY / 4 < len(found) < MANY * 3 / 4
    assert found == sorted({*found})


def test_some_frames_come_twice(faults, sent):
    faults.everywhere(doubles=50)
    found = sent("node0", "node1")
    assert MANY * 5 / 4 < len(found) < MANY * 7 / 4
    assert found == sorted(found)
    assert {*found} == {*range(MANY)}


def test_some_frames_overtake_others(faults, sent):
    faults.everywhere(jitter=50)
    found = sent("node0", "node1")
    assert found != sorted(found)
    assert sorted(found) == [*range(MANY)]


def test_all_frames_are_late_and_a_stream_is_unharmed_by_any_fault(bed, faults, connect):
    conversation = connect(bed, "node0", "node1")
    faults.everywhere(delay=300)
    assert conversation.seconds() > 0.6
    faults.everywhere(delay=1, jitter=2, loss=2, doubles=5)
    conversation.echoes(200_000)


def test_what_the_switch_with_faults_leaves_is_found_and_goes(bed, switch, connect):
    assert not bed.left_of_carriers()
    faults = Faults(bed, switch)
    faults.part(["node0"], ["node1", "node2"])
    process, *others = bed.left_of_carriers()
    assert "/switch v0-0 v0-1 v0-2" in process
    assert sum(word.startswith("packet socket ") for word in others) == 3
    assert others[-3:] == [f"port v0-{number} outside the bridge" for number in range(3)]
    faults.close()
    assert not bed.left_of_carriers()
    connect(bed, "node0", "node1").echoes()


# --- clocks


def test_hosts_have_been_up_for_different_times(bed):
    if not bed.has_uptimes:
        pytest.skip("this kernel has no time namespaces")
    now = [float(bed.run(host, [*PYTHON, "-c", "import time; print(time.monotonic())"]).stdout) for host in bed.hosts]
    assert [round((now[i + 1] - now[i]) / UPTIME, 4) for i in range(2)] == [1, 1]
    up = float(bed.run("node2", ["ssh", "node1", "cat /proc/uptime"]).stdout.split()[0])
    assert abs(up - now[1]) < 60


CONDITION = """
import ctypes, time
libc = ctypes.CDLL(None)
condition, mutex = bytes(256), bytes(256)
began, at = time.monotonic(), time.time() + 0.2
libc.pthread_mutex_lock(mutex)
libc.pthread_cond_timedwait(condition, mutex, (ctypes.c_long * 2)(int(at), int(at % 1 * 1e9)))
print(time.monotonic() - began)
"""


def test_a_wall_clock_can_be_set_under_running_programs(make_bed):
    bed = make_bed(["node0", "node1"], clocks=True)
    program = [*PYTHON, "-u", "-c", "import sys, time\nfor _ in sys.stdin: print(time.time())"]
    with bed.start("node1", program, **pipes()) as running:
        for ahead in (600, -600, 2.5, 0):
            bed.set_clock("node1", ahead)
            began = time.time()
            running.stdin.write(b"\n")
            running.stdin.flush()
            assert began - 0.1 <= float(line_of(running)) - ahead <= time.time() + 0.1
            if abs(ahead) == 600:
                shown = int(bed.run("node0", ["ssh", "node1", "date +%s"]).stdout)
                assert began - 1 <= shown - ahead <= time.time() + 1
                assert began - 1 <= int(bed.run("node0", ["date", "+%s"]).stdout) <= time.time() + 1
                waited = float(bed.run("node1", [*PYTHON, "-c", CONDITION]).stdout)
                assert 0.2 <= waited < 300, "deadlines by the wall clock come when they should"


# --- other networks


def test_the_own_name_can_stand_for_a_loopback_address(make_bed):
    bed = make_bed(["node0", "node1"], own_name_on_loopback=True)
    for host, other in [bed.hosts, bed.hosts[::-1]]:
        assert bed.run(host, ["getent", "hosts", host]).stdout.split()[0] == "127.0.1.1"
        assert bed.run(host, ["getent", "hosts", other]).stdout.split()[0] == bed.address(other)


def test_a_bed_can_speak_ipv6_only(make_bed, connect):
    bed = make_bed(["node0", "node1"], names="6")
    assert "10.77." not in bed.run("node0", ["ip", "address"]).stdout
    assert connect(bed, "node0", "node1").address == bed.address("node1") == "fd77:1::11"
    assert bed.run("node0", ["ssh", "node1", "hostname"]).stdout == "node1\n"


def test_hosts_can_have_a_second_network(make_bed, connect):
    bed = make_bed(["node0", "node1"], networks=2)
    first, second = connect(bed, "node0", "node1"), connect(bed, "node0", "node1", "node1-b")
    assert (first.address, second.address) == (bed.address("node1"), bed.address("node1", network=1))
    bed.lag("node1", 1500, network=1)
    assert first.seconds() < 3 <= second.seconds()
    bed.cut("node1")
    assert first.exchange(patience=0.3) == second.exchange(patience=0.3) == "silence"


# --- jobs, and what is left


def test_a_process_or_a_socket_that_a_job_leaves_is_found(job):
    bed = job.bed
    job.nothing_left()
    with bed.start("node2", [*PYTHON, ECHO, "serve"], stdout=subprocess.PIPE) as server:
        port = line_of(server)
        with pytest.raises(AssertionError, match=rf"(?s)node2.*echo\.py serve.*port={port}"):
            job.nothing_left()
        server.kill()
    bed.run("node1", ["setsid", "-f", "sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (left,) = until(
        lambda: [it for it in bed.processes("node1") if it.command == "sleep 600"], "what is left to be found"
    )
    os.kill(left.pid, signal.SIGKILL)
    job.nothing_left(patience=PATIENCE)


def things() -> tuple[set[str], list[str], set[Path]]:
    """What a bed may leave on the machine: mounts, network interfaces, files."""
    mounts = set(Path("/proc/self/mountinfo").read_text().splitlines())
    folders = set(Path(tempfile.gettempdir()).glob(f"ddplaunch-bed-{os.getpid()}-*"))
    return mounts, sorted(os.listdir("/sys/class/net")), folders


def of_beds_of(pid: int) -> list[int]:
    """The processes of the beds that a process has made."""
    return [child for child in proc.children(pid) if "unshare" in Path(f"/proc/{child}/comm").read_text()]


def test_nothing_of_a_bed_is_left_on_the_machine(switch):
    before, beds = things(), of_beds_of(os.getpid())
    bed = Bed(["node0", "node1"])
    inits = [bed._switch.pid, *(host.pid for host in bed._hosts.values())]
    try:
        sleeping = bed.start("node0", ["sleep", "600"])
        bed.lag("node1", 1)
        assert things()[:2] == before[:2]
        bed.unlag("node1")
        Faults(bed, switch)
        assert things()[:2] == before[:2]
    finally:
        bed.close()
    assert sleeping.returncode == -signal.SIGKILL
    assert things() == before
    assert of_beds_of(os.getpid()) == beds
    assert not [pid for pid in inits if Path(f"/proc/{pid}").exists()]


KILLED = """
from tests.hosts.bed import Bed
bed = Bed(["node0", "node1"])
left = [bed._switch.pid, *(host.pid for host in bed._hosts.values())]
left += [bed.start("node0", ["setsid", "sleep", "600"]).pid, bed.start("node1", ["sleep", "600"]).inside()]
bed.lag("node1", 1)
print(bed.home.parent, *left, flush=True)
input()
"""


def test_nothing_of_a_bed_outlives_its_maker():
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", KILLED], cwd=root, **pipes()) as maker:
        folder, *pids = maker.stdout.readline().decode().split()
        assert Path(folder).is_dir()
        assert len(pids) == 5
        maker.kill()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the processes to be gone")
    until(lambda: not Path(folder).exists(), "the files to be gone")
