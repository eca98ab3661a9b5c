"""Functions as jobs: whatever ends the caller, or the command behind it, nothing of the job is left."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
from hmac import digest
from pathlib import Path

import pytest

from ddplaunch.record import folders
from ddplaunch.spec.job import RUNNER
from ddplaunch.tools.functions import connection
from tests.conftest import PATIENCE, let_the_echo_die, until
from tests.process.calling import Program
from tests.process.terminal import CTRL_C, Terminal

SCRIPT = """
    import ddplaunch, sys
    from tests.programs import functions
    if __name__ == "__main__":
        try:
            ddplaunch.launch(getattr(functions, sys.argv[1]), nproc_per_node=2, grace_period=float(sys.argv[2]))
        except BaseException as error:
            print("caught", type(error).__name__)
            raise
"""


@pytest.fixture
def caller(job):
    """A program that calls launch(), and what it starts."""
    return Program(job.home, mark=job.mark)


def fronts(caller: Program) -> list[int]:
    """The command behind the caller, and its agent."""
    found = []
    for pid in caller.left():
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if b"launcher.start.call" in file.read():
                found.append(pid)
    return sorted(found)


def test_ctrl_c_in_a_terminal_ends_all_and_raises_keyboard_interrupt(caller):
    script = caller.write(SCRIPT)
    terminal = Terminal(caller, caller.argv(script, "sleeps", 30))
    caller.signs("sleeps", 2)
    terminal.press(CTRL_C)
    shown = terminal.sees_the_end()
    assert "caught KeyboardInterrupt" in shown
    assert "\n[0] " not in shown and "\n[1] " not in shown  # the workers' own tracebacks would say it twice more
    assert "in _wait" not in shown and "run_once" not in shown  # nor does our own loop
    (started,) = caller.events("job_started")
    assert started["program"] == "functions.py:sleeps"
    caller.nothing_left(PATIENCE)


def test_a_second_ctrl_c_kills_workers_that_ignore_the_first(caller):
    terminal = Terminal(caller, caller.argv(caller.write(SCRIPT), "ignores_the_stop", 600))
    caller.signs("sleeps", 2)
    terminal.press(CTRL_C)
    until(lambda: caller.events("signal_received"), "the first signal")
    let_the_echo_die()
    terminal.press(CTRL_C)
    assert "caught KeyboardInterrupt" in terminal.sees_the_end()


def test_without_a_terminal_a_second_interrupt_is_the_first_one_and_a_third_kills(caller):
    """A caller in `uv run` is interrupted twice."""
    said = caller.home / "err"
    with open(said, "w") as err:
        process = caller.start(caller.write(SCRIPT), "ignores_the_stop", 600, stderr=err)
    caller.signs("sleeps", 2)
    process.send_signal(signal.SIGINT)
    until(lambda: caller.events("signal_received"), "the first signal")
    let_the_echo_die()
    process.send_signal(signal.SIGINT)
    line = "ddplaunch: another interrupt counts as the first one. A third one kills the workers at once\n"
    until(lambda: line in said.read_text(), "a word about the second one")
    assert not caller.events("kill_sent")
    let_the_echo_die()
    process.send_signal(signal.SIGINT)
    result = caller.wait()
    assert "caught KeyboardInterrupt" in result.out
    assert result.status == -signal.SIGINT


def test_a_caller_that_is_interrupted_and_then_terminated_leaves_its_workers_the_time_to_save(caller):
    """As by LSF and CI runners: the second signal ends the caller itself, which its command sees."""
    process = caller.start(caller.write(SCRIPT), "saves", 30)
    caller.signs("sleeps", 2)
    process.send_signal(signal.SIGINT)
    caller.signs("saving", 2)
    process.send_signal(signal.SIGTERM)
    assert caller.wait().status == -signal.SIGTERM
    caller.signs("saved", 2)
    caller.nothing_left(PATIENCE)


@pytest.mark.parametrize(
    ("signum", "does", "grace_period"),
    [(signal.SIGKILL, "sleeps", 30), (signal.SIGTERM, "sleeps", 30), (signal.SIGKILL, "ignores_the_stop", 1)],
)
def test_the_workers_of_a_caller_that_is_killed_end_or_are_killed_themselves(caller, signum, does, grace_period):
    process = caller.start(caller.write(SCRIPT), does, grace_period)
    caller.signs("sleeps", 2)
    process.send_signal(signum)
    caller.wait()
    caller.nothing_left(PATIENCE)


@pytest.mark.parametrize("which", [0, 1])
def test_a_killed_command_or_agent_is_told_and_leaves_nothing(which, caller):
    caller.start(caller.write(SCRIPT), "sleeps", 30)
    caller.signs("sleeps", 2)
    until(lambda: folders.goes_on(str(caller.folder)), "the run to be seen to go on")
    os.kill(fronts(caller)[which], signal.SIGKILL)
    result = caller.wait()
    assert "caught JobError" in result.out
    assert "was killed by SIGKILL" in result.err
    caller.nothing_left()
    assert not folders.goes_on(str(caller.folder))


def test_an_error_in_the_caller_ends_the_job(caller):
    caller.start(
        caller.write(
            """
            import ddplaunch, signal
            from tests.programs import functions
            def stop(*_): raise LookupError("of the caller")
            if __name__ == "__main__":
                signal.signal(signal.SIGUSR1, stop)
                ddplaunch.launch(functions.sleeps, nproc_per_node=2)
            """
        )
    )
    caller.signs("sleeps", 2)
    assert caller.process is not None
    caller.process.send_signal(signal.SIGUSR1)
    result = caller.wait()
    assert result.err.rstrip().endswith("LookupError: of the caller")
    assert result.status == 1


def test_a_stranger_is_refused_and_costs_nothing(caller):
    script = caller.write(
        """
        import ddplaunch, os, socket
        from ddplaunch.tools.functions import connection
        from tests.programs import functions
        def knocks():
            name = os.environ["PEEK"]
            hello = b"x" * connection.HELLO.size
            for said in (b"", hello, b"x" * 4):
                stranger = socket.socket(socket.AF_UNIX)
                stranger.connect(b"\\0" + name.encode())
                stranger.sendall(said)
                if said == hello:
                    assert len(stranger.recv(99)) == connection.NONCE_SIZE
                    assert stranger.recv(1) == b""
                kept.append(stranger)
            return len(kept)
        kept = []
        if __name__ == "__main__":
            real = os.urandom
            os.environ["PEEK"] = "ddplaunch/" + "07" * 16
            os.urandom = lambda size: b"\\7" * size if size == 16 else real(size)
            print(ddplaunch.launch(knocks, nproc_per_node=2))
        """
    )
    result = caller.run(script)
    assert result.out == "[3, 3]\n", result.err


def test_a_caller_without_room_for_the_connection_of_a_worker_says_what_to_do(caller):
    script = caller.write(
        """
        import ddplaunch, os, resource
        from ddplaunch.tools.functions.caller import Caller
        from tests.programs import functions
        if __name__ == "__main__":
            start = Caller._start
            def limited(self, collected):
                start(self, collected)
                free = os.dup(0)
                os.close(free)
                resource.setrlimit(resource.RLIMIT_NOFILE, (free, free))
            Caller._start = limited
            ddplaunch.launch(functions.sleeps, nproc_per_node=2)
        """
    )
    result = caller.run(script).expect(1)
    assert "JobError: cannot take the connection of a worker: Too many open files; `ulimit -n 4096`" in result.err


class Mischief:
    """What a pickle can do to who unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("knows", [False, True], ids=["impostor", "caller"])
def test_a_worker_unpickles_nothing_before_the_caller_has_proved_that_it_knows_the_secret(tmp_path, knows):
    secret, call = os.urandom(32), pickle.dumps(Mischief(tmp_path / "unpickled"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # the kernel chooses an abstract address
        listener.listen()
        address = f"{listener.getsockname()[1:].decode()} {secret.hex()}"
        env = {**os.environ, "DDPLAUNCH_CALL": address, "RANK": "0", "WORLD_SIZE": "1"}
        worker = subprocess.Popen([sys.executable, RUNNER], env=env, stderr=subprocess.PIPE, text=True)
        with listener.accept()[0] as sock:
            nonce = os.urandom(connection.NONCE_SIZE)
            sock.sendall(nonce)
            hello = sock.recv(connection.HELLO.size, socket.MSG_WAITALL)
            said = nonce + hello[: -connection.NONCE_SIZE]
            proof = digest(secret, b"caller" + said, "sha256") if knows else hello[-connection.NONCE_SIZE :]
            assert hello.endswith(digest(secret, b"worker" + said, "sha256"))
            assert secret not in hello
            sock.sendall(proof + connection.CALL.pack(len(call), 0, 0) + call)
            _, err = worker.communicate(timeout=60)
    assert worker.returncode == 1
    assert (tmp_path / "unpickled").exists() is knows
    assert ("another process listens at the address of the caller" in err) is not knows


# --- where it is called from


def test_a_script_without_a_guard_is_told_so(caller):
    script = caller.write(
        """
        import ddplaunch
        def f(): pass
        ddplaunch.launch(f, nproc_per_node=2)
        """
    )
    result = caller.run(script).expect(1)
    assert 'Put the call under `if __name__ == "__main__":`' in result.err
    assert f"while it imported {script}" in result.err


@pytest.mark.parametrize("way", ["script", "module"])
def test_functions_and_classes_of_the_main_module_come_and_go(way, caller):
    caller.write(
        """
        import ddplaunch, os, sys
        class Point:
            def __init__(self, x): self.x = x
        class Odd(Exception): pass
        def f(point):
            assert sys.argv[1:] == ["--flag"], sys.argv
            if point.x == 0:
                raise Odd("zero")
            return Point(point.x + int(os.environ["RANK"]))
        if __name__ == "__main__":
            found = ddplaunch.launch(f, (Point(5),), nproc_per_node=2)
            print([(type(one) is Point, one.x) for one in found])
            try:
                ddplaunch.launch(f, (Point(0),), nproc_per_node=1)
            except Odd as odd:
                print("caught", odd, odd.rank)
        """
    )
    result = caller.run(*(("-m", "script") if way == "module" else ("script.py",)), "--flag", cwd=caller.home)
    assert result.out == "[(True, 5), (True, 6)]\ncaught zero 0\n", result.err


INTERACTIVE = """
import ddplaunch, os
base = 40
class Point:
    pass

def f():
    point = Point()
    point.x = base + int(os.environ["RANK"])
    return point

print([(type(one) is Point, one.x) for one in ddplaunch.launch(f, nproc_per_node=2)])
"""


@pytest.mark.parametrize("way", ["stdin", "interactive", "-c"])
def test_what_is_typed_into_an_interpreter_travels_by_value(way, caller):
    pytest.importorskip("cloudpickle", reason="needs cloudpickle, of the extra `test`")
    if way == "-c":
        result = caller.run("-c", INTERACTIVE)
    else:
        process = caller.start(*["-i"] * (way == "interactive"), "-", stdin=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(INTERACTIVE.encode())
        process.stdin.close()
        process.stdin = None
        result = caller.wait()
    assert "[(True, 40), (True, 41)]\n" in result.out, result.err


def test_without_cloudpickle_it_says_what_to_do(caller):
    hidden = "import sys; sys.modules['cloudpickle'] = None\n"
    result = caller.run("-c", hidden + textwrap.dedent(INTERACTIVE)).expect(1)
    assert "TypeError: f and its arguments use definitions of this session, which workers cannot import" in result.err
    assert "`pip install cloudpickle`, or put it into a module that workers can import" in result.err
    result = caller.run("-c", hidden + "import ddplaunch; ddplaunch.launch(print, (lambda: 0,), nproc_per_node=1)")
    assert "args[0] cannot be sent to workers" in result.err and "`pip install cloudpickle`" in result.err


def test_the_package_need_not_be_installed(caller):
    folder = caller.env["PYTHONPATH"]
    script = (
        f"import sys; sys.path.append({folder!r}); import ddplaunch; print(ddplaunch.launch(str, nproc_per_node=1))"
    )
    result = caller.run("-c", script, env={"PYTHONPATH": ""})
    assert result.out == "['']\n", result.err


def test_locks_and_queues_of_multiprocessing_work(caller):
    script = caller.write(
        """
        import ddplaunch, multiprocessing
        from tests.programs import functions
        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            queue, lock = context.Queue(), context.Lock()
            ddplaunch.launch(functions.puts, (queue, lock), nproc_per_node=2)
            print(sorted(queue.get(timeout=60) for _ in range(2)))
            assert multiprocessing.get_start_method(allow_none=True) is None
        """
    )
    result = caller.run(script)
    assert (result.out, result.err) == ("[0, 1]\n", "")


def test_importing_the_package_costs_nothing(caller):
    ask = "import sys; before = set(sys.modules); import ddplaunch; print(sorted(set(sys.modules) - before))"
    assert caller.run("-c", ask).out == "['ddplaunch']\n"
    ask = "import ddplaunch; print(dir(ddplaunch).count('launch')); ddplaunch.lunch"
    result = caller.run("-c", ask)
    assert result.out == "1\n" and "module 'ddplaunch' has no attribute 'lunch'" in result.err


def test_torch_is_not_imported_for_those_who_have_not_imported_it(caller):
    script = caller.write(
        """
        import ddplaunch, sys
        def f(): return "torch" in sys.modules
        if __name__ == "__main__":
            print(ddplaunch.launch(f, nproc_per_node=1), "torch" in sys.modules)
        """
    )
    assert caller.run(script).out == "[False] False\n"
