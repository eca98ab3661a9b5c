"""--start-method forkserver: workers are forked from one interpreter, and nothing else is different."""

import ctypes
import gc
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest

from ddplaunch import worker
from tests.conftest import PATIENCE, Job, Result, until

WORKER = """
    import os, sys
    import preloaded
    rank, signs = os.environ["RANK"], os.environ["DDP_TEST_DIR"]
    generation = os.environ["TORCHELASTIC_RESTART_COUNT"]
    with open(f"{signs}/parent-{generation}-{rank}.part", "w") as file:
        file.write(f"{os.getppid()} {preloaded.pid}")
    os.rename(file.name, file.name[:-5])
"""
ONE_CPU = {
    "preexec_fn": lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
    "env": {"CUDA_VISIBLE_DEVICES": ""},
}
RAISES_UNPRINTABLE = "class Unprintable(Exception):\n    def __str__(self): raise self\nraise Unprintable\n"
IMPORTED = "import os\npid = os.getpid()\n"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """Write a file beside the script."""

    def write(name: str, source: str) -> Path:
        path = tmp_path / name
        path.write_text(dedent(source))
        return path

    return write


@pytest.fixture
def run(job: Job, write) -> Callable[..., Result]:
    """Run a script with 2 workers that are forked after `preloaded` was imported, then prove that nothing is left."""

    def run(
        script: str = WORKER, imported: str = IMPORTED, *options: object, preload: str = "preloaded", **popen: Any
    ) -> Result:
        write("preloaded.py", imported)
        method = ("--start-method", "forkserver", "--preload", preload)
        result = job.run("--nproc-per-node", 2, *method, *options, write("train.py", script), **popen)
        job.nothing_left()
        return result

    return run


def parents(job: Job, generation: int = 0) -> set[tuple[str, ...]]:
    """The parent of each worker, and the process that imported for it."""
    return {tuple(job.sign(f"parent-{generation}-{rank}").split()) for rank in range(2)}


def test_workers_are_the_agents_children_and_share_what_was_imported(run, job):
    result = run()
    assert (result.status, result.out) == (0, "")
    assert "fresh processes" not in result.err
    ((agent, server),) = parents(job)
    assert agent != server
    assert int(server) not in job.pids().values()


def test_by_auto_two_workers_of_one_cpu_are_forked_if_they_import_torch_and_nothing_is_said_of_it(job, write):
    write("torch.py", IMPORTED)
    job.start(
        "--start-method",
        "auto",
        "--nproc-per-node",
        2,
        write("train.py", WORKER.replace("preloaded", "torch")),
        **ONE_CPU,
    )
    result = job.wait().expect(0)
    assert "import" not in result.err  # torch.distributed cannot be
    assert len(parents(job)) == 1
    fresh = WORKER.replace("import preloaded", "sys.path += []; import preloaded").replace("preloaded", "torch")
    job.start("--start-method", "auto", "--nproc-per-node", 2, write("train.py", fresh), **ONE_CPU)
    assert job.wait().status == 0
    assert len({importer for _, importer in parents(job)}) == 2


def test_a_restart_forks_from_the_same_server(run, job):
    waits = "    while not all(os.path.exists(f'{signs}/parent-{generation}-{one}') for one in '01'): pass\n"
    script = WORKER + waits + "    assert generation == '2' or rank == '1', 'again'\n"
    assert run(script, IMPORTED, "--max-restarts", 2).status == 0
    assert parents(job, 0) == parents(job, 1) == parents(job, 2)


def test_an_exception_ends_the_job_as_ever(run):
    result = run("def f(): raise KeyError('boom')\nf()").expect(1)
    assert "failed: KeyError: 'boom'" in result.err
    assert "train.py:1 in f" in result.err


def test_each_worker_has_random_numbers_of_its_own(run):
    pytest.importorskip("numpy")
    script = "import random, numpy as np\nprint(random.random(), np.random.rand())"
    numbers = [line.split()[1:] for line in run(script, preload="random,numpy.random").out.splitlines()]
    assert len(numbers) == 2
    assert len({number for both in numbers for number in both}) == 4


def test_what_an_import_prints_is_printed_by_each_worker(run):
    result = run("print('runs')", "import sys\nprint('imports')\nprint('warns', file=sys.stderr)")
    assert sorted(result.out.splitlines()) == ["[0] imports", "[0] runs", "[1] imports", "[1] runs"]
    assert {"[0] warns", "[1] warns"} <= set(result.err.splitlines())


def test_an_import_may_set_how_often_the_collector_looks(run):
    result = run("import gc; print(gc.get_threshold())", "import gc\ngc.set_threshold(70, 7)")
    expected = (70, 7, *gc.get_threshold()[2:])  # what it has not set is as in any Python
    assert set(result.out.splitlines()) == {f"[0] {expected}", f"[1] {expected}"}


def test_a_module_that_cannot_be_imported_is_named_and_left_out(run, job):
    result = run(preload="no_such_module,raises,preloaded", imported=IMPORTED).expect(0)
    assert result.err.count("not imported by the fork server: ") == 2
    assert "not imported by the fork server: no_such_module: ModuleNotFoundError: No module named" in result.err
    assert len(parents(job)) == 1


@pytest.mark.parametrize("imported", ["raise ValueError('x' * 10_000)", RAISES_UNPRINTABLE])
def test_a_module_may_raise_whatever_it_likes(run, imported):
    result = run("print('runs')", imported, preexec_fn=limited_files).expect(0)
    assert "not imported by the fork server: preloaded: " in result.err
    assert "fresh processes" not in result.err


def test_imports_that_take_long_are_named(job, write):
    write(
        "preloaded.py",
        "import os, time\nwhile not os.path.exists(os.environ['DDP_TEST_DIR'] + '/go'): time.sleep(0.01)",
    )
    with open(job.home / "err", "w+") as err:
        options = ("--nproc-per-node", 2, "--start-method", "forkserver", "--preload", "preloaded")
        job.start(*options, write("train.py", "print('runs')"), stderr=err)
        until(lambda: "is still importing after 10 s" in (job.home / "err").read_text(), "a word about the imports")
    (job.home / "signs" / "go").touch()
    result = job.wait()
    assert (result.status, sorted(result.out.splitlines())) == (0, ["[0] runs", "[1] runs"])


def test_after_a_package_that_was_imported_in_part_workers_are_fresh(run, write, tmp_path):
    """As torch where a file beside the script has the name of a module that it imports: imported twice, it crashes."""
    (tmp_path / "half").mkdir()
    write("half/part.py", "")
    write("half/__init__.py", "import half.part\nraise ImportError('the other half')")
    result = run("print('runs')", preload="half")
    assert sorted(result.out.splitlines()) == ["[0] runs", "[1] runs"]
    assert "fresh processes, not by the fork server: half can only be imported in part" in result.err


@pytest.mark.parametrize(
    "imported", ["import os\nos.close(0)", "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)"]
)
def test_a_module_may_close_stdin_or_have_children_reaped_by_the_kernel(run, imported):
    result = run("print('runs')", imported, preexec_fn=limited_files)
    assert sorted(result.out.splitlines()) == ["[0] runs", "[1] runs"]
    assert "fresh processes" not in result.err


@pytest.mark.parametrize(
    ("imported", "why"),
    [
        (
            "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
            "an imported module has started threads, which a forked process would not have",
        ),
        ("import subprocess\nsubprocess.Popen(['sleep', '600'])", "an imported module has started a process"),
        ("import socket\nkept = socket.socket()", "an imported module has opened a socket"),
        ("import os\nos.chdir('/')", "an imported module has changed the working directory"),
        ("import os\nos._exit(3)", "it has ended"),
        (
            "fork = os.fork\ndef killed():\n    os.fork = fork\n    return fork() or os.kill(os.getpid(), 9)\nos.fork = killed",
            "the process that was to fork them was killed by signal 9",
        ),
    ],
)
def test_workers_are_fresh_processes_where_none_may_be_forked(run, job, imported, why):
    in_server = "if 'RANK' not in os.environ:\n" + indent(imported, "    ")
    result = run(imported=IMPORTED + in_server).expect(0)
    assert f"ddplaunch: workers are started as fresh processes, not by the fork server: {why}" in result.err
    assert len({importer for _, importer in parents(job)}) == 2


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["is killed", "stands still"])
def test_a_server_that_does_not_answer_is_done_without(job, write, signum):
    write("preloaded.py", IMPORTED)
    script = write(
        "train.py",
        WORKER
        + "    while generation == '0' and not os.path.exists(f'{signs}/fail'): pass\n    assert generation == '1'\n",
    )
    options = ("--max-restarts", 1, "--start-method", "forkserver", "--preload", "preloaded")
    job.start("--nproc-per-node", 2, *options, script)
    ((_, server),) = parents(job)
    os.kill(int(server), signum)
    (job.home / "signs" / "fail").touch()
    result = job.wait().expect(0)
    assert result.err.count("workers are started as fresh processes, not by the fork server: ") == 1
    assert len({importer for _, importer in parents(job, 1)}) == 2


DIES = """
if 'RANK' not in os.environ:
    def after():
        if os.getpid() == pid:  # it has forked, and not said whom
            os.kill(pid, 9)
    os.register_at_fork(after_in_parent=after)
"""


def test_no_rank_runs_twice_where_the_server_dies_before_it_has_said_whom_it_forked(run, job):
    result = run("import os\nprint('runs')\nopen(os.environ['DDP_TEST_DIR'] + '/ran', 'a').write('x')", IMPORTED + DIES)
    assert "fresh processes, not by the fork server: " in result.err
    assert sorted(result.out.splitlines()) == ["[0] runs", "[1] runs"]
    assert (job.home / "signs" / "ran").read_text() == "xx"


LIMITED = """
if 'RANK' not in os.environ:
    forked, fork = 0, os.fork
    def limited():
        global forked
        forked += 1
        if forked == 3:  # the process in between and one worker are there
            raise BlockingIOError(11, 'no room')
        return fork()
    os.fork = limited
"""


FEW_FILES = """opened = []
try:
    while True:
        opened.append(os.dup(0))
except OSError:
    for fd in opened[-free:]:
        os.close(fd)
"""


def limited_files() -> None:
    """Be allowed so many open files that a module has soon opened them, and more than select(2) takes."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, 2000))


def few_files(free: int) -> str:
    """A module that opens files until there is room for so many more; two workers that are forked together take ten."""
    return f"{IMPORTED}free = {free}\n{FEW_FILES}"


@pytest.mark.parametrize(
    ("imported", "rank", "why"),
    [(IMPORTED + LIMITED, 1, "Resource temporarily unavailable"), (few_files(1), 0, "Too many open files")],
    ids=["no process", "not all of its files"],
)
def test_where_one_worker_cannot_be_forked_those_before_it_do_not_begin(run, imported, rank, why):
    result = run("print('runs')", imported, preexec_fn=limited_files)
    assert (result.status, result.out) == (126, "")
    assert f"rank {rank} could not be started: cannot create a process: {why}" in result.err


def test_where_the_server_has_room_for_the_files_of_one_worker_they_are_forked_one_by_one(run):
    result = run(
        "import preloaded; print('forked', preloaded.pid != preloaded.os.getpid())",
        few_files(8),
        preexec_fn=limited_files,
    )
    assert (result.status, sorted(result.out.splitlines())) == (0, ["[0] forked True", "[1] forked True"])
    assert "fresh processes" not in result.err


LOWERED = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (12, hard))  # the server gets ten descriptors for two workers
"""
SHOWS_LIMIT = "import preloaded, resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"


def test_a_limit_that_an_import_lowers_is_that_of_the_workers_and_not_of_the_server(run):
    result = run(SHOWS_LIMIT, IMPORTED + LOWERED)
    assert (result.status, sorted(result.out.splitlines())) == (0, ["[0] 12", "[1] 12"])
    assert "fresh processes" not in result.err


def test_where_an_import_has_lowered_a_limit_for_good_workers_are_fresh_processes(job, write):
    write("preloaded.py", IMPORTED + LOWERED.replace("(12, hard)", "(12, 12)"))
    # PR_CAPBSET_DROP, CAP_SYS_RESOURCE: root too loses it by exec
    drop = partial(ctypes.CDLL(None).prctl, 24, 24, 0, 0, 0)
    options = ("--nproc-per-node", 2, "--start-method", "forkserver", "--preload", "preloaded")
    result = job.run(*options, write("train.py", SHOWS_LIMIT), preexec_fn=drop)
    assert (result.status, sorted(result.out.splitlines())) == (0, ["[0] 12", "[1] 12"])
    why = "fresh processes, not by the fork server: an imported module has lowered the hard limit of open files\n"
    assert result.err.count(why) == 1


@pytest.mark.parametrize(("limit", "status"), [(44, 126), (75, 0)], ids=["for one of them", "for all together"])
def test_where_there_are_too_few_open_files_for_eight_workers_as_many_are_started_as_can_be(job, write, limit, status):
    write("preloaded.py", IMPORTED)
    options = ("--nproc-per-node", 8, "--start-method", "forkserver", "--preload", "preloaded")
    result = job.run(
        *options, write("train.py", WORKER),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
    )  # fmt: skip
    assert result.status == status
    assert bool(re.search(r"rank [1-7] could not be started: .*: Too many open files", result.err)) is (status == 126)


SLOW = """
    import os, signal
    sign = f"{os.environ['DDP_TEST_DIR']}/imports"
    with open(f"{sign}.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{sign}.part", sign)
    signal.pause()
"""


def importing(job: Job, write: Callable[[str, str], Path]) -> int:
    """Start a job whose server never ends its imports; give the process of the server."""
    write("preloaded.py", SLOW)
    options = ("--start-method", "forkserver", "--preload", "preloaded")
    job.start("--nproc-per-node", 2, *options, write("train.py", "print('never')"))
    return int(job.sign("imports"))


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_job_is_stopped_during_the_imports(job, write, signum, status):
    importing(job, write)
    assert job.process is not None
    job.process.send_signal(signum)
    result = job.wait()
    assert (result.status, result.out) == (status, "")


def test_nothing_is_left_when_the_command_is_killed_during_the_imports(job, write):
    importing(job, write)
    assert job.process is not None
    job.process.kill()
    job.wait()
    job.nothing_left(patience=PATIENCE)


def test_a_server_that_dies_of_an_import_is_done_without(job, write):
    server = importing(job, write)
    write("preloaded.py", IMPORTED)
    write("train.py", WORKER)
    os.kill(server, signal.SIGSEGV)
    assert job.wait().status == 0
    assert len({importer for _, importer in parents(job)}) == 2


def test_the_server_of_a_job_without_restarts_ends_once_all_workers_are_there(job, write):
    write("preloaded.py", IMPORTED)
    script = write("train.py", WORKER + "    while not os.path.exists(f'{signs}/end'): pass\n")
    job.start("--nproc-per-node", 2, "--start-method", "forkserver", "--preload", "preloaded", script)
    ((_, server),) = parents(job)
    until(lambda: not os.path.exists(f"/proc/{server}"), "the end of the server")
    (job.home / "signs" / "end").touch()
    assert job.wait().status == 0


GIVES_UP = """
import os, select, signal, sys
from ddplaunch.launcher.workers import servers
from ddplaunch.system.process.linux import become_subreaper
from ddplaunch.system.process.child import Stdio, handled_signals

become_subreaper()
command = [sys.executable, sys.argv[1], "script", sys.argv[2]]
server = servers.ForkServer(command, os.environ, [], handled=handled_signals())
while not server.is_ready:
    select.select([server], [], [])
    server.read()
read, write = os.pipe()
servers.ANSWER_TIMEOUT = 0.1
os.kill(server.pid, signal.SIGSTOP)
try:
    server.fork([servers.Fork(command, os.environ, Stdio(0, write, write))])
except servers.ServerLost as lost:
    print(lost)
os.kill(server.pid, signal.SIGCONT)
select.select([server], [], [])  # it has forked a worker all the same
server.close()
os.close(write)
print(os.read(read, 100).decode() or "nothing ran")
"""


def test_a_worker_that_is_forked_too_late_does_not_run(write):
    script = write("train.py", "print('a worker ran')")
    bootstrap = Path(worker.__file__).parent / "bootstrap.py"
    done = subprocess.run(
        [sys.executable, "-c", GIVES_UP, bootstrap, script], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout, done.stderr) == ("it does not answer\nnothing ran\n", "")
