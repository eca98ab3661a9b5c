"""Functions as jobs: what comes back, what is shown, what is raised."""

import os
import pickle
import signal
import socket
import sys
import threading

import pytest

import ddplaunch
from tests.conftest import descriptors
from tests.programs import functions


@pytest.fixture(autouse=True)
def at_home(job, monkeypatch):
    """A home for the jobs that this process starts; nothing of them is left when they have ended."""
    for name in ("state", "tmp", "signs"):
        (job.home / name).mkdir()
    for name in ("XDG_STATE_HOME", "TMPDIR", "DDP_TEST_MARK", "DDP_TEST_DIR"):
        monkeypatch.setenv(name, job.env[name])
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(job.home)
    opened = descriptors()
    yield
    job.nothing_left()
    assert descriptors() == opened


# --- what comes back


def test_results_come_back_in_the_order_of_ranks():
    found = ddplaunch.launch(functions.place, (1, [2]), {"three": 3}, nproc_per_node=3)
    assert found == [(rank, 3, (1, [2]), {"three": 3}) for rank in range(3)]


def test_what_a_worker_left_behind_is_gone_when_it_returns(job):
    (pid,) = ddplaunch.launch(functions.leaves_a_child, nproc_per_node=1)
    assert not job.left(), pid


def test_options_of_the_command_are_keywords():
    assert ddplaunch.launch(
        functions.variable, ("COLOUR",), nproc_per_node="1", env={"COLOUR": "blue green"}, threads=2, grace_period=1.5
    ) == ["blue green"]


def test_files_and_variables_give_defaults(job, monkeypatch):
    (job.home / "ddplaunch.toml").write_text('nproc-per-node = 2\nhosts = "a,b"\n')
    monkeypatch.setenv("DDPLAUNCH_ROLE", "tester")
    assert ddplaunch.launch(functions.variable, ("ROLE_NAME",)) == ["tester"] * 2


def test_simulated_nodes_have_their_own_ranks():
    assert [rank for rank, *_ in ddplaunch.launch(functions.place, nproc_per_node=2, nnodes=2, simulate=True)] == [
        0,
        1,
        2,
        3,
    ]


def test_after_a_restart_only_the_last_generation_counts(capfd):
    assert ddplaunch.launch(functions.fails_once, nproc_per_node=2, max_restarts=1) == [0, 1]
    assert "rank 1 failed: ValueError: the first time" in capfd.readouterr().err


def test_forked_workers_share_what_was_imported_from_where_the_caller_imports(job, monkeypatch, capfd):
    (job.home / "store.py").write_text("import os\npid = os.getpid()\n")  # as one of ddplaunch's own files is called
    monkeypatch.syspath_prepend(job.home)
    options = {"start_method": "forkserver", "preload": "store", "max_restarts": 1}
    found = ddplaunch.launch(functions.fails_once_then_imports, ("store",), nproc_per_node=2, **options)
    ((importer, _), (same, environment)) = found
    assert importer == same != os.getpid()
    assert "DDPLAUNCH_CALL" not in environment
    assert "the first time" in capfd.readouterr().err


def test_several_threads_call_at_once():
    found = {}

    def call(number):
        found[number] = ddplaunch.launch(functions.place, (number,), nproc_per_node=2)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [(rank, 2, (number,), {}) for rank in range(2)] for number in range(3)}


def test_a_function_of_a_function_travels_by_value():
    pytest.importorskip("cloudpickle", reason="needs cloudpickle, of the extra `test`")
    base = 10

    def add(number):
        return base + number

    assert ddplaunch.launch(add, (5,), nproc_per_node=1) == [15]
    assert ddplaunch.launch(lambda: base, nproc_per_node=1) == [10]


# --- what is shown


def test_what_workers_print_comes_through_our_own_streams(capsys):
    ddplaunch.launch(functions.says, ("one of {rank}", "two of {rank}"), nproc_per_node=2)
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == ["[0] one of 0", "[0] two of 0", "[1] one of 1", "[1] two of 1"]
    assert sorted(shown.err.splitlines()) == ["[0] err 0", "[1] err 1"]


def test_output_chooses_what_is_shown(capsys):
    ddplaunch.launch(functions.says, ("one of {rank}",), nproc_per_node=2, output="rank0", quiet=False)
    shown = capsys.readouterr()
    assert shown.out == "one of 0\n"
    first, _, own, last = shown.err.splitlines()
    assert ": 2 workers, gloo" in first and own == "err 0" and "2 workers finished in" in last


def test_a_stream_that_is_closed_or_missing_does_no_harm(monkeypatch, capfd):
    with open(os.devnull, "w") as closed:
        pass
    monkeypatch.setattr(sys, "stdout", closed)
    monkeypatch.setattr(sys, "stderr", None)
    assert ddplaunch.launch(functions.says, ("unheard",), nproc_per_node=1) == [None]
    assert capfd.readouterr() == ("", "")


# --- what is raised


def failure(function, *args, **options):
    with pytest.raises(ddplaunch.JobError) as caught:
        ddplaunch.launch(function, args, **{"nproc_per_node": 2, **options})
    return caught.value


def told(error):
    """All that is shown of an exception."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def test_the_exception_of_the_first_failure_is_raised_here(capfd, job):
    error = failure(functions.raises, "ValueError")
    assert isinstance(error, ValueError) and isinstance(error, ddplaunch.WorkerFailed)
    assert (str(error), type(error).__qualname__) == ("boom", "ValueError")
    assert (error.rank, error.local_rank, error.exit_status, error.signal) == (1, 1, 1, None)
    assert error.pid == job.pids()[1]
    assert (
        error.traceback.startswith("Traceback (most recent call last):\n  File")
        and "worker/call.py" not in error.traceback
    )
    assert 'raise ValueError("boom")' in told(error)
    assert "the other worker was stopped by SIGTERM" in told(error)
    assert capfd.readouterr() == ("", "")  # it is told once


def test_a_failure_on_a_simulated_node_names_the_node(capfd):
    error = failure(functions.raises, "ValueError", nproc_per_node=1, nnodes=2, simulate=True)
    assert isinstance(error, ValueError)
    assert (error.rank, error.host) == (1, "node-1")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("OSError", FileNotFoundError, "[Errno 2] No such file or directory: '/no/such/file'"),
        ("Refused", functions.Refused, "it refused with 7"),
        ("CannotBeRebuilt", functions.CannotBeRebuilt, "only one argument is kept"),
        ("local", ddplaunch.WorkerFailed, "of a function"),
        ("group", ExceptionGroup, "several (2 sub-exceptions)"),
        ("cause", RuntimeError, "later"),
    ],
)
def test_an_exception_keeps_its_type_where_that_is_possible(what, kind, text):
    error = failure(functions.raises, what)
    assert isinstance(error, kind) and isinstance(error, ddplaunch.WorkerFailed)
    assert text in str(error)
    if what == "OSError":
        assert (error.errno, error.filename) == (2, "/no/such/file")
    if what == "Refused":
        assert error.code == 7
    if what == "cause":
        assert "KeyError: 'key'" in error.traceback and type(error).__name__ == "RuntimeError" and str(error) == "later"
    if isinstance(error, kind) and kind is not ddplaunch.WorkerFailed:
        again = pickle.loads(pickle.dumps(error))  # as a pool of processes or pytest-xdist would hand it on
        assert (type(again).__mro__[1:], str(again), again.rank) == (type(error).__mro__[1:], str(error), 1)


@pytest.mark.parametrize(
    ("how", "text", "status", "signum"),
    [
        ("exit", "rank 1 failed: exit status 3", 3, None),
        ("sys.exit", "rank 1 failed: exit status 4", 4, None),
        ("SIGSEGV", "rank 1 failed: killed by SIGSEGV", 139, signal.SIGSEGV),
        ("SIGKILL", "rank 1 failed: killed by SIGKILL", 137, signal.SIGKILL),
    ],
)
def test_a_death_without_an_exception_is_told_with_its_status(how, text, status, signum):
    error = failure(functions.dies, how)
    assert type(error) is ddplaunch.WorkerFailed
    assert text in str(error)
    assert (error.rank, error.exit_status, error.signal, error.traceback) == (1, status, signum, None)
    if how == "SIGSEGV":
        assert "in dies" in told(error)  # faulthandler's stack


def test_a_worker_that_ends_well_without_a_result_is_an_error():
    with pytest.raises(
        ddplaunch.WorkerFailed, match="rank 0 ended with exit status 0 before its function had returned"
    ):
        ddplaunch.launch(os._exit, (0,), nproc_per_node=1)


def test_a_timeout_shows_where_each_rank_was():
    for seconds in (2, 8, 60):  # a busy machine may need longer to start three workers
        error = failure(functions.waits_apart, timeout=seconds, nproc_per_node=3)
        if all(text in told(error) for text in ("in waits_here", "in waits_there", "had returned")):
            break
    assert isinstance(error, TimeoutError)
    assert str(error).startswith(f"stopped: timeout of {seconds} s was reached; 2 workers ended in")
    first, second, third = error.__notes__
    assert "where rank 0 was:" in first and "in waits_here" in first
    assert "where rank 1 was:" in second and "in waits_there" in second
    assert third == "\nrank 2 had returned: perhaps the others waited for that"
    assert "worker/" not in told(error)


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        (
            "generator",
            TypeError,
            "the result cannot be sent to the caller: cannot pickle 'generator' object; return list",
        ),
        ("coroutine", TypeError, "cannot pickle 'coroutine' object; run it with asyncio.run()"),
        ("lambda", TypeError, "the result cannot be sent to the caller: "),
        (1001, ValueError, "the result is larger than max_result_bytes=1000"),
    ],
)
def test_a_result_that_cannot_come_back_is_an_error_that_names_the_rank(what, kind, text):
    error = failure(functions.returns, what, max_result_bytes=1000)
    assert isinstance(error, kind) and text in str(error)
    assert f"This is the exception of rank {error.rank}, when its result was to be sent:" in told(error)


# --- bad input: nothing is started


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"nproc_per_node": 0}, ValueError, "nproc_per_node=0: expected a number from 1 to 65536"),
        ({"nproc_per_node": -1}, ValueError, 'expected a number from 1 to 65536, "gpu", "cpu" or "auto"'),
        ({"nproc_per_node": 1.5}, ValueError, "nproc_per_node="),
        ({"nproc_per_node": True}, TypeError, "nproc_per_node=True: expected a string or a number, not bool"),
        ({"nproc": 2}, TypeError, "unexpected keyword argument 'nproc'"),
        ({"time_out": 2}, TypeError, "did you mean 'timeout'?"),
        ({"timeout": "soon"}, ValueError, "timeout='soon': expected seconds"),
        ({"timeout": [2]}, TypeError, r"timeout=\[2\]: expected a string or a number, not list"),
        ({"output": "prefixed"}, ValueError, "did you mean `output='prefix'`?"),
        ({"env": {"A B": "1"}}, ValueError, "A B"),
        ({"verbose": "yes"}, TypeError, "verbose='yes': expected True or False, not str"),
        ({"quiet": True, "verbose": True}, ValueError, "quiet=True and verbose=True do not go together"),
        ({"module": True}, ValueError, "module=True: a function runs in the interpreter that has it"),
        ({"debug": 0}, ValueError, "the workers of a function have no terminal"),
        ({"hosts": "a,b"}, ValueError, "hosts='a,b': the workers of a function run on this machine"),
        ({"nnodes": 2}, ValueError, "nnodes=2: the workers of a function run on this machine; add simulate=True"),
        ({"max_result_bytes": 0}, ValueError, "max_result_bytes=0"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_started(options, kind, text, job):
    with pytest.raises(kind, match=text):
        ddplaunch.launch(functions.place, **options)
    assert not list((job.home / "state").iterdir())


@pytest.mark.parametrize(("nodes", "status"), [({}, 2), ({"nnodes": 2, "simulate": True}, 121)])
def test_what_the_machine_cannot_do_is_told_as_the_command_would(nodes, status, capfd):
    error = failure(functions.place, devices="77", **nodes)
    assert type(error) is ddplaunch.JobError and error.status == status
    assert "77" in str(error)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("function", "args", "text"),
    [
        ("place", (), "launch() needs a function, not str"),
        (
            functions.place,
            (threading.Lock(),),
            r"args[0] cannot be sent to workers: cannot pickle '_thread.lock' object",
        ),
        (functions.place, "ab", "args='ab': expected a tuple or a list, not str"),
        (functions.place, 5, "args=5: expected a tuple or a list, not int"),
    ],
)
def test_what_cannot_be_sent_is_named(function, args, text, job):
    with pytest.raises(TypeError) as caught:
        ddplaunch.launch(function, args, nproc_per_node=1)
    assert text in str(caught.value)
    assert not list((job.home / "state").iterdir())


class Once:
    """An argument that can be pickled for one worker only."""

    pickled = 0

    def __reduce__(self):
        Once.pickled += 1
        if Once.pickled > 1:
            raise LookupError("once is enough")
        return str, ()


def test_what_can_be_sent_to_one_worker_only_ends_the_job(job):
    with pytest.raises(TypeError, match=r"args\[0\] cannot be sent to workers: once is enough"):
        ddplaunch.launch(functions.sleeps_with, (Once(),), nproc_per_node=2)


class Broken:
    """A stream that fails."""

    def write(self, text):
        raise RuntimeError("of the stream")


def test_a_stream_that_raises_ends_the_job_once(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Broken())
    with pytest.raises(RuntimeError, match="of the stream"):
        ddplaunch.launch(functions.chatters, nproc_per_node=2)


def test_a_port_that_is_taken_is_told():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = failure(functions.place, master_port=port)
    assert str(error).startswith(f"master_port {port} is taken by pid {os.getpid()}")
    assert "hint: leave master_port out" in told(error)


def test_it_is_refused_in_a_worker():
    error = failure(ddplaunch.launch, functions.place)
    assert isinstance(error, RuntimeError)
    assert "launch() was called in a worker (rank" in str(error)
