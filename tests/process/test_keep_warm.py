"""--keep-warm: the next run finds what this one has imported, and is otherwise as any other."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import psutil
import pytest

from ddplaunch.launcher.workers import show, warm
from ddplaunch.launcher.workers.servers import packed_request
from ddplaunch.record import run_socket
from ddplaunch.system.process.tree import descendants, look, tidies
from tests.conftest import PATIENCE, Job, Result, until
from tests.process import keeping
from tests.process.terminal import agent_of, typed
from tests.process.test_fork_server import LIMITED, few_files, limited_files

PTRACE_SEIZE = 0x4206  # linux/ptrace.h
WALL = 0x40000000  # linux/wait.h
IMPORTED = "import os\npid = os.getpid()\n"
# each worker says who its parent is, who has imported for it, and what it has left behind
WORKER = """
    import os, subprocess, sys, time
    import preloaded
    rank, signs = os.environ["RANK"], os.environ["DDP_TEST_DIR"]
    generation = os.environ["TORCHELASTIC_RESTART_COUNT"]
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    def sign(name, text=""):
        with open(f"{signs}/{name}-{rank}.part", "w") as file:
            file.write(str(text))
        os.rename(file.name, file.name[:-5])
    sign(f"parents-{generation}", f"{os.getppid()} {preloaded.pid}")
"""
WAITS = WORKER + "    signs and time.sleep(600)\n"


@pytest.fixture
def job(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """One whose sockets lie in its home, where the test looks for them too, and which waits as a test waits."""
    sockets = str(tmp_path / "sockets")
    monkeypatch.setattr(run_socket, "runtime_folder", lambda _uid: sockets)
    job.command = [sys.executable, keeping.__file__, sockets, str(PATIENCE)]
    return job


@pytest.fixture
def keep(job: Job, tmp_path: Path) -> Iterator[Keep]:
    """Jobs whose interpreter is kept; it is ended with the test, and then nothing is left."""
    keep = Keep(job, tmp_path)
    yield keep
    for pid in keep.interpreters:
        end(pid)
    job.nothing_left(patience=PATIENCE)


def end(pid: int) -> None:
    """Kill what is kept, if it has not ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Keep:
    """Jobs of two workers."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job = job
        self.folder = folder
        self.interpreters: set[int] = set()
        (folder / "preloaded.py").write_text(IMPORTED)
        os.utime(folder / "preloaded.py", (1, 1))

    def start(self, script: str = WORKER, *options: object, **popen: Any) -> None:
        """Start one."""
        (self.folder / "train.py").write_text(dedent(script))
        given = ("--nproc-per-node", 2, "--keep-warm", "--preload", "preloaded", *options)
        self.job.start(*given, self.folder / "train.py", **popen)

    def run(self, script: str = WORKER, *options: object, **popen: Any) -> tuple[Result, int, int]:
        """Run one to its end; give the parent of its workers, too, and what has imported for them."""
        self.start(script, *options, **popen)
        guard, interpreter = self.parents()
        return self.wait(), guard, interpreter

    def wait(self) -> Result:
        """Wait for its end; prove that it has left nothing but what is kept."""
        result = self.job.wait()
        assert set(self.job.left()) <= self.interpreters
        return result

    def parents(self, generation: int = 0) -> tuple[int, int]:
        """Return the parent of its workers, and what has imported for them; it is one for both."""
        (both,) = {self.job.sign(f"parents-{generation}-{rank}") for rank in range(2)}
        guard, interpreter = map(int, both.split())
        self.interpreters.add(interpreter)
        return guard, interpreter


def socket_of(pid: int) -> str:
    """The socket of the interpreter that is kept in this process."""
    return next(name for name in warm.socket_names() if (kept := show.state_of(name)) is not None and kept.pid == pid)


def test_the_next_run_is_forked_from_what_the_first_has_imported(keep, tmp_path):
    first, guard, interpreter = keep.run()
    assert (first.status, first.out) == (0, "")
    says = "preloaded stays imported when this run has ended, for 10 min after the last that uses it; "
    assert f"{says}`ddplaunch warm --stop` ends it" in " ".join(first.err.split())
    os.utime(tmp_path / "sockets" / socket_of(interpreter), (1, 1))
    facts = "    print(sys.argv[1:], os.getcwd(), os.umask(0), os.getsid(0) == os.getpid())\n"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    second, other_guard, same = keep.run(WORKER + facts, cwd=elsewhere, preexec_fn=lambda: os.umask(0o77))
    assert (second.status, same) == (0, interpreter)
    assert "stays imported" not in second.err
    assert other_guard != guard
    assert second.out.splitlines()[0][4:] == f"[] {elsewhere} 63 True"
    assert [os.readlink(f"/proc/{interpreter}/{name}") for name in ("cwd", "fd/0", "fd/1", "fd/2")] == [
        "/",
        *["/dev/null"] * 3,
    ]
    assert os.getsid(interpreter) == interpreter
    kept_at = socket_of(interpreter)
    kept = show.state_of(kept_at)
    assert kept is not None
    assert (kept.runs, kept.running, kept.modules) == (2, 0, "preloaded")
    assert (tmp_path / "sockets" / kept_at).stat().st_mtime > 1
    plan = keep.job.run("plan", "--nproc-per-node", 2, "--keep-warm", "--preload", "preloaded", tmp_path / "train.py")
    assert f"process {interpreter}  --keep-warm" in plan.out
    assert re.search(rf"^{interpreter} .* preloaded +2 ", keep.job.run("warm").out, re.MULTILINE)


def test_of_several_modules_the_note_says_that_they_stay(keep):
    first, _, _ = keep.run(WORKER, "--preload", "preloaded,json")
    assert "ddplaunch: preloaded, json stay imported when this run has ended, " in first.err


def test_a_package_that_takes_long_to_import_is_named_with_its_seconds_until_it_is_preloaded(keep, tmp_path):
    installed = tmp_path / "site-packages"
    (installed / "heavy").mkdir(parents=True)
    (installed / "heavy/__init__.py").touch()
    (installed / "heavy/part.py").write_text("import time, light\ntime.sleep(0.6)\n")
    (installed / "light.py").touch()
    (tmp_path / "own.py").write_text("import heavy.part, time\ntime.sleep(0.6)\n")
    env = {"PYTHONPATH": str(installed)}
    advice = (
        r"each worker imported heavy\.part \([0-9.]+ s\) itself; `--preload preloaded,heavy\.part` keeps that warm too"
    )
    first, *_ = keep.run(WORKER + "    import own\n", env=env)
    assert re.search(advice, " ".join(first.err.split()))
    second, *_ = keep.run(WORKER + "    import own\n", "--preload", "preloaded,heavy.part", env=env)
    assert "each worker imported" not in second.err


def test_ps_tells_what_is_kept_from_a_worker(keep):
    keep.start(WAITS)
    guard, interpreter = keep.parents()
    kept, of_run = psutil.Process(interpreter), psutil.Process(guard)
    assert kept.name() == "ddplaunch-warm"
    assert kept.cmdline()[0] == "ddplaunch-warm (`ddplaunch warm --stop` ends it)"
    workers = of_run.children()
    assert [one.name() for one in (of_run, *workers)] == [os.path.basename(sys.executable)] * 3
    assert {tuple(one.cmdline()[-2:]) for one in (of_run, *workers)} == {("script", f"{keep.folder}/train.py")}
    keep.job.process.send_signal(signal.SIGTERM)
    keep.wait()


def test_it_serves_no_run_that_would_differ(keep, tmp_path):
    _, _, interpreter = keep.run()
    _, _, other = keep.run(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)))
    _, _, third = keep.run(WORKER, "--threads", 2)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "subprocess.py").touch()
    assert warm.ask(socket_of(interpreter), "check", "60", f"{tmp_path}/elsewhere").startswith("unfit scripts in ")
    assert len({interpreter, other, third}) == 3
    os.utime(tmp_path / "preloaded.py", (2, 2))
    result, _, new = keep.run()
    assert new not in (interpreter, other, third)
    assert (
        f"the interpreter that was kept warm is not used, and a new one is started: {tmp_path}/preloaded.py has"
        in result.err
    )
    until(lambda: not os.path.exists(f"/proc/{interpreter}"), "the end of what is not used any more")


def test_where_there_were_too_many_with_one_more_that_taken_longest_ago_ends(keep, tmp_path):
    os.close(run_socket.open_runtime_folder(make=True))
    folder = os.open(tmp_path / "sockets", os.O_RDONLY)
    there = [socket.socket(socket.AF_UNIX) for _ in range(warm.MOST)]
    for number, listener in enumerate(there):
        run_socket.listen(listener, folder, name := f".warm-{number}")
        os.utime(name, (number ^ 1, number ^ 1), dir_fd=folder)
        listener.setblocking(False)
    assert keep.run()[0].status == 0
    asked = [received(listener) for listener in there]
    assert [packed_request("stop") in requests for requests in asked] == [False, True, False, False]
    os.close(folder)


def received(listener: socket.socket) -> list[bytes]:
    """Take all connections that have come; give what each has sent."""
    requests = []
    with listener, suppress(BlockingIOError):
        while True:
            connection, _ = listener.accept()
            with connection:
                requests.append(connection.recv(100))
    return requests


def test_it_ends_when_no_run_has_come_for_so_long(keep, tmp_path):
    _, _, interpreter = keep.run()
    assert warm.ask(socket_of(interpreter), "check", "1", str(tmp_path)) == "ok"
    until(lambda: not os.path.exists(f"/proc/{interpreter}"), "its end")
    assert keep.run()[2] != interpreter


def test_failures_are_told_and_restarted_as_those_of_any_worker(keep):
    waits = "    while not all(os.path.exists(f'{signs}/parents-{generation}-{one}') for one in '01'): pass\n"
    fails = """
    if rank == "0":
        time.sleep(600)
    sys.exit(3) if generation == "0" else os.kill(os.getpid(), 11)
"""
    result, guard, interpreter = keep.run(WORKER + waits + fails, "--max-restarts", 1)
    assert keep.parents(1) == (guard, interpreter)
    assert result.status == 139
    assert "rank 1" in result.err
    assert "exit status 3" in result.err
    assert "SIGSEGV" in result.err


@pytest.mark.parametrize(
    ("imported", "rank", "why"),
    [(IMPORTED + LIMITED, 1, "Resource temporarily unavailable"), (few_files(5), 0, "Too many open files")],
    ids=["no process", "not all of its files"],
)
def test_where_one_worker_cannot_be_forked_those_before_it_do_not_begin(keep, imported, rank, why):
    result = run_with(keep, imported)
    assert (result.status, result.out) == (126, "")
    assert f"rank {rank} could not be started: cannot create a process: {why}" in result.err


def test_a_guard_that_does_not_get_all_that_a_run_gives_it_is_done_without(keep):
    once = f"os.mkdir({str(keep.folder / 'imported')!r})"
    result = run_with(keep, f"import os\ntry:\n {once}\nexcept OSError:\n pass\nelse:\n{indent(few_files(2), ' ')}")
    assert (result.status, sorted(result.out.splitlines())) == (0, ["[0] runs", "[1] runs"])
    # by when it was seen
    assert re.search(r"is not used, and another one imports again|not by the fork server", result.err)


def run_with(keep: Keep, imported: str) -> Result:
    """Run a job whose interpreter imports this; whether it is kept or has ended, it is ended with the test."""
    (keep.folder / "preloaded.py").write_text(imported)
    keep.start("print('runs')", preexec_fn=limited_files)
    result = keep.job.wait()
    keep.interpreters.update(kept.pid for kept in map(show.state_of, warm.socket_names()) if kept is not None)
    return result


def test_the_workers_are_stopped_as_ever(keep, job):
    handles = "    import signal\n    signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('saved')))\n"
    script = WAITS.replace("    left =", handles + "    left =")
    keep.start(script)
    keep.parents()
    job.process.send_signal(signal.SIGTERM)
    result = keep.wait()
    assert (result.status, sorted(result.out.splitlines())) == (143, ["[0] saved", "[1] saved"])
    keep.start(script)
    guard, _ = keep.parents()
    os.kill(guard, signal.SIGSTOP)
    job.process.send_signal(signal.SIGINT)
    assert keep.wait().status == 130


def test_whatever_is_killed_only_what_is_kept_is_left(keep, job):
    for who in ("front", "agent", "front and agent"):
        keep.start(WAITS)
        guard, interpreter = keep.parents()
        front = job.process.pid
        agent = agent_of(front)
        if who != "front":
            os.kill(guard, signal.SIGSTOP)
        for pid in [front] * ("front" in who) + [agent] * ("agent" in who):
            os.kill(pid, signal.SIGKILL)
        job.wait()
        if who == "agent":
            assert set(job.left()) <= {interpreter}
        until(lambda: set(job.left()) <= keep.interpreters, "the end of all that the run has started")
    assert len(keep.interpreters) == 1


def test_when_the_guard_is_killed_the_workers_are_too_and_what_they_have_started(keep):
    keep.start(WAITS)
    guard, _ = keep.parents()
    os.kill(guard, signal.SIGKILL)
    result = keep.wait().expect(137)
    assert "SIGKILL" in result.err


@pytest.mark.parametrize("who", ["the agent", "the guard"])
def test_whatever_is_killed_the_names_that_workers_have_shared_are_removed(keep, who):
    name = f"shared-{keep.job.mark}"
    shares = f"""
    from multiprocessing import shared_memory
    block = shared_memory.SharedMemory("{name}-" + rank, create=True, size=4096)
    """
    keep.start(WORKER.replace("    def sign", shares + "def sign") + "    signs and time.sleep(600)\n")
    guard, _ = keep.parents()
    assert keep.job.process is not None
    until(lambda: sum(map(tidies, descendants(guard))) == 2, "the trackers of two workers")  # their exec takes a moment
    os.kill(guard if who == "the guard" else agent_of(keep.job.process.pid), signal.SIGKILL)
    keep.job.wait()
    until(lambda: not list(Path("/dev/shm").glob(f"{name}*")), "the end of what removes the names")
    until(lambda: set(keep.job.left()) <= keep.interpreters, "the end of all that the run has started")


def test_what_does_not_end_when_it_is_killed_keeps_nobody_waiting(keep, tmp_path):
    keep.start(WAITS)
    guard, interpreter = keep.parents()
    [left, *_] = [each.pid for each in psutil.Process(guard).children(recursive=True) if each.name() == "sleep"]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(PTRACE_SEIZE, left, None, None):  # its end is then ours first, and its parent's when we have seen it
        pytest.skip(f"no process of ours may be traced: {os.strerror(ctypes.get_errno())}")
    os.kill(guard, signal.SIGKILL)
    until(lambda: (found := look(left)) is not None and found.state == "Z", "its end")
    assert keep.wait().status == 137
    assert keep.run()[2] == interpreter
    assert look(left) is not None
    os.waitpid(left, WALL)
    until(lambda: look(left) is None, "the interpreter to reap it")
    assert keep.run()[2] == interpreter


def test_a_run_goes_on_when_what_is_kept_is_killed_and_the_next_starts_another(keep, job):
    keep.start(WORKER + "    while not os.path.exists(f'{signs}/go'): time.sleep(0.01)\n")
    _, interpreter = keep.parents()
    end(interpreter)
    (job.home / "signs" / "go").touch()
    assert keep.wait().status == 0
    keep.interpreters.clear()
    result, _, other = keep.run()
    assert (result.status, "kept warm" in result.err) == (0, False)
    assert other != interpreter


def test_what_is_kept_minds_no_other_client(keep):
    _, _, interpreter = keep.run()
    name = socket_of(interpreter)
    for request in (
        (),
        ("",),
        ("guard",),
        ("guard", "x", "/"),
        ("check", "99999999999999999999999999999999", "/"),
        ("check", "9" * 5000, "/"),
        ("check", "60", "/\0"),
        ("\udcff" * 9000,),
        ("no such request",),
    ):
        warm.ask(name, *request)
    for received_in_part in (b"\0", b"status\n of another version", packed_request("status")[:-1], b"\xff" * 8):
        with warm.connect(name) as client:
            client.sendall(received_in_part)
            assert client.recv(100) == b""
    warm.connect(name).close()
    silent = warm.connect(name)
    assert warm.ask(name, "status").startswith(f"{interpreter}\t")
    silent.sendall(packed_request("status"))
    assert silent.recv(100).startswith(b"%d\t" % interpreter)
    silent.close()
    silent = warm.connect(name)
    assert keep.run()[2] == interpreter
    silent.close()


def test_what_is_kept_keeps_no_descriptor_that_a_client_sends(keep):
    _, _, interpreter = keep.run()
    before = len(os.listdir(f"/proc/{interpreter}/fd"))
    with warm.connect(socket_of(interpreter)) as client:
        socket.send_fds(client, [packed_request("status")], [client.fileno()])
        assert client.recv(100).startswith(b"%d\t" % interpreter)
    until(lambda: len(os.listdir(f"/proc/{interpreter}/fd")) == before, "the end of what the client has sent", 20)
    result, _, same = keep.run()
    assert (result.err.count("is not used"), same) == (0, interpreter)


def test_what_is_kept_waits_while_it_has_no_room_for_a_client_and_then_serves_it(keep, tmp_path):
    _, _, interpreter = keep.run()
    folder, name = os.open(tmp_path / "sockets", os.O_RDONLY), socket_of(interpreter)
    limits = resource.prlimit(interpreter, resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(PATIENCE)
        client.connect(run_socket.address(folder, name))
        os.close(folder)
        client.sendall(packed_request("status"))
        before = sleeps(interpreter)
        until(lambda: sleeps(interpreter) >= before + 5, "it to sleep and look again")
        resource.prlimit(interpreter, resource.RLIMIT_NOFILE, limits)
        assert client.recv(100).startswith(f"{interpreter}\t".encode())


def sleeps(pid: int) -> int:
    """How often this process has waited for something so far."""
    return int(
        re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[0]
    )


def test_a_single_worker_which_has_the_terminal_leaves_nothing_and_the_run_says_so(keep):
    terminal = typed(keep.job, "--keep-warm", "--preload", "preloaded", keep.folder / "preloaded.py")
    shown = " ".join(terminal.sees_the_end().split())
    assert "no interpreter is kept warm: the worker that has the terminal is a fresh process" in shown
    assert terminal.status() == 0


def test_two_runs_at_once_share_it_and_it_ends_with_the_last_if_it_was_stopped(keep, job, tmp_path):
    keep.start(WAITS)
    guard, interpreter = keep.parents()
    first, job.process = job.process, None
    job.start("--nproc-per-node", 2, "--keep-warm", "--preload", "preloaded", tmp_path / "train.py")
    other, same = keep.parents()
    assert (same, other == guard) == (interpreter, False)
    job.process.send_signal(signal.SIGINT)
    assert job.wait().status == 130
    assert os.path.exists(f"/proc/{guard}")
    with warm.connect(name := socket_of(interpreter)) as early:
        assert warm.ask(name, "stop") == "ok"
        early.sendall(packed_request("check", "60", str(tmp_path)))
        assert early.recv(100) == b"stale it ends with the runs that it serves\n"
    first.send_signal(signal.SIGINT)
    job.process = first
    assert keep.wait().status == 130
    until(lambda: not job.left(), "the end of what was kept")


def test_one_that_does_not_answer_is_done_without(keep):
    _, _, interpreter = keep.run()
    os.kill(interpreter, signal.SIGSTOP)
    keep.job.command[-1] = "0.1"
    result = keep.job.run("--nproc-per-node", 2, "--keep-warm", "--preload", "preloaded", keep.folder / "train.py")
    assert result.status == 0
    assert "no interpreter is kept warm: the one that is there does not answer" in result.err


def test_all_that_is_kept_is_shown_and_stopped(keep, job):
    assert job.run("warm").out == job.run("warm", "--stop").out == "no interpreter is kept warm\n"
    _, _, idle = keep.run()
    _, _, silent = keep.run(WORKER, "--threads", 2)
    os.kill(silent, signal.SIGSTOP)
    keep.start(WAITS, "--threads", 3)
    guard, used = keep.parents()
    run, job.process = job.process, None
    job.command[-1] = "2"
    assert f"process {silent}: imports still, or hangs" in job.run("warm").out
    assert sorted(job.run("warm", "--stop").out.splitlines()) == sorted(
        [f"process {idle} ends", f"process {silent} did not answer, and was killed", f"process {used} ends after 1 run"]
    )
    until(lambda: set(job.left()).isdisjoint({idle, silent}), "the end of those that serve no run")
    assert os.path.exists(f"/proc/{guard}")
    assert [show.state_of(name) for name in warm.socket_names()] == [None]  # a socket that who was killed has left
    run.send_signal(signal.SIGINT)
    job.process = run
    assert keep.wait().status == 130
    until(lambda: not job.left(), "the end of the last")
