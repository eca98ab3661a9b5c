"""A debugger around the command, as F5 in VS Code and PyCharm: breakpoints stop in each rank, once in each, and nowhere else."""

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from urllib.parse import unquote

import pytest

from tests.conftest import PATIENCE, Job, until
from tests.process.dap import Editor

pytestmark = pytest.mark.skipif(importlib.util.find_spec("debugpy") is None, reason="debugpy is not installed")

TRAIN = """
    import os, sys
    here = "rank " + os.environ["RANK"]
    print(here, "is done", sys.argv[1:], __spec__ if __name__ != "__main__" else "")  # BREAK
    """
LAUNCHES = """
    import os
    import ddplaunch
    def train(number):
        here = "rank " + os.environ["RANK"]
        return number * int(os.environ["RANK"])  # BREAK
    if __name__ == "__main__":
        print("results", ddplaunch.launch(train, (3,), nproc_per_node=2), flush=True)
    """
PAGE = (Path(__file__).parents[2] / "docs/guides/debugging.md").read_text()
TWO = ("--nproc-per-node", 2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def debug(job: Job, tmp_path: Path) -> "Debug":
    return Debug(job, tmp_path)


class Debug:
    """A project of one script, one package and one program, debugged by an editor."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job = job
        self.folder = folder
        (folder / "pkg").mkdir()
        (folder / "pkg/__init__.py").touch()
        for name, text in (("train.py", TRAIN), ("pkg/train.py", TRAIN), ("program.py", LAUNCHES)):
            (folder / name).write_text(dedent(text).strip() + "\n")

    def write(self, text: str) -> None:
        """Write the script."""
        (self.folder / "train.py").write_text(dedent(text).strip() + "\n")

    def attach(self, file: str, *command: object) -> Editor:
        """Run `python -m debugpy --listen ... COMMAND`, and attach to that."""
        port = free_port()
        self.job.command = [sys.executable, "-m", "debugpy", "--listen", f"127.0.0.1:{port}", "--wait-for-client"]
        self.job.start(*command, cwd=self.folder, env={"PYDEVD_DISABLE_FILE_VALIDATION": "1"})
        until(lambda: self.has_listener(port), "the port of debugpy")
        editor = Editor(self.folder / file)
        editor.begin(port, "attach", name="attach", type="debugpy", connect={"host": "127.0.0.1", "port": port})
        return editor

    def has_listener(self, port: int) -> bool:
        """Whether a process listens at this port; nothing connects to it for that, which debugpy would take for its client."""
        assert self.job.process is not None
        assert self.job.process.poll() is None, self.job.wait()
        return f"0100007F:{port:04X} 00000000:0000 0A" in Path("/proc/net/tcp").read_text()

    def launch(self, file: str, **configuration: object) -> Editor:
        """Press F5 for this configuration of launch.json: the adapter starts the program."""
        found = self.folder / "endpoints.json"
        self.job.command = [sys.executable, "-m", "debugpy.adapter", "--host", "127.0.0.1", "--port", "0"]
        env = {"DEBUGPY_ADAPTER_ENDPOINTS": str(found), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        self.job.start(cwd=self.folder, env=env)
        until(lambda: found.exists() and found.read_text().strip().endswith("}"), "the port of the adapter", 30)
        editor = Editor(self.folder / file)
        given = {"name": "launch", "type": "debugpy", "console": "internalConsole", "cwd": str(self.folder)}
        editor.begin(json.loads(found.read_text())["client"]["port"], "launch", **given, **configuration)
        return editor


def done(text: str) -> list[str]:
    """The lines of ranks that are done."""
    return sorted(line for line in text.splitlines() if "is done" in line)


DONE = ["[0] rank 0 is done ['--lr', '1'] ", "[1] rank 1 is done ['--lr', '1'] "]


WAYS = {"train.py": ["train.py"], "pkg/train.py": ["-m", "pkg.train"]}  # the file, and how a command line names it


@pytest.mark.parametrize("file", WAYS)
def test_each_rank_stops_at_the_breakpoint_once_where_the_page_runs_the_command_under_debugpy(
    file: str, debug: Debug
) -> None:
    shown = re.search(
        r"^python -m debugpy --listen 5678 --wait-for-client (-m ddplaunch .*) train\.py$", PAGE, re.MULTILINE
    )
    assert shown is not None
    editor = debug.attach(file, *shown[1].split(), *WAYS[file], "--lr", 1)
    assert editor.stopped(2) == ["rank 0", "rank 1"]
    editor.wait()
    assert done(debug.job.wait().expect(0).out) == DONE
    assert len(editor.followed) == len(editor.hits) == 2  # nothing else of ours was debugged
    debug.job.nothing_left()


@pytest.mark.parametrize("file", WAYS)
def test_each_rank_stops_where_the_launch_json_of_the_page_is_started_by_f5(file: str, debug: Debug) -> None:
    (configuration,) = json.loads(PAGE.split("```json\n")[1].partition("```")[0])["configurations"]
    assert (configuration["type"], configuration["request"], configuration["args"][-1]) == (
        "debugpy",
        "launch",
        "train.py",
    )
    arguments = [*configuration["args"][:-1], *WAYS[file], "--lr", "1"]
    editor = debug.launch(file, module=configuration["module"], args=arguments)
    assert editor.stopped(2) == ["rank 0", "rank 1"]
    editor.wait()
    assert done(editor.output) == DONE
    debug.job.wait()
    debug.job.nothing_left(patience=PATIENCE)


def test_each_rank_stops_in_the_function_that_a_program_under_the_debugger_launches(debug: Debug) -> None:
    editor = debug.launch("program.py", program=str(debug.folder / "program.py"))
    assert editor.stopped(2) == ["rank 0", "rank 1"]
    editor.wait()
    assert "results [0, 3]" in editor.output
    assert len(editor.followed) == 3  # two workers, and the command that launch() has started
    debug.job.wait()
    debug.job.nothing_left()


@pytest.mark.parametrize(
    ("asked", "note"),
    [
        (("--start-method", "forkserver"), "workers are fresh processes"),
        (("--keep-warm",), "no interpreter is kept warm"),
    ],
)
def test_workers_that_were_to_be_forked_are_fresh_ones_that_stop_and_a_line_says_so(
    asked: tuple[str, ...], note: str, debug: Debug
) -> None:
    editor = debug.attach("train.py", "-m", "ddplaunch", *TWO, *asked, "--preload", "json", "train.py")
    assert editor.stopped(2) == ["rank 0", "rank 1"]
    editor.wait()
    result = debug.job.wait().expect(0)
    assert f"ddplaunch: {note}: the debugger around this command gets into fresh processes only\n" in result.err
    debug.job.nothing_left()


def test_the_ranks_of_simulated_nodes_stop(debug: Debug) -> None:
    editor = debug.attach("train.py", "-m", "ddplaunch", "--nnodes", 2, "--nproc-per-node", 1, "--simulate", "train.py")
    assert editor.stopped(2) == ["rank 0", "rank 1"]
    editor.wait()
    assert len(done(debug.job.wait().expect(0).out)) == 2
    debug.job.nothing_left()


def test_ranks_that_are_held_are_no_hang_and_no_time_limit_ends_them(debug: Debug) -> None:
    limits = ("--timeout", 3, "--hang-timeout", 1)
    editor = debug.attach("train.py", "-m", "ddplaunch", *TWO, *limits, "train.py")
    editor.stopped(2)
    until(lambda: time.monotonic() > debug.job.began + 6, "a time that is longer than both limits")
    until((debug.job.folder / "about.json").exists, "what the job is about, which an interpreter was asked for")
    editor.wait()
    debug.job.wait().expect(0)
    assert len(editor.followed) == 2


def test_ctrl_c_ends_all_that_is_held(debug: Debug) -> None:
    editor = debug.attach("train.py", "-m", "ddplaunch", *TWO, "train.py")
    editor.stopped(2)
    assert debug.job.process is not None
    debug.job.process.send_signal(signal.SIGINT)
    assert debug.job.process.wait(PATIENCE) == 130
    editor.wait()
    debug.job.wait()
    debug.job.nothing_left(patience=PATIENCE)


@pytest.mark.parametrize("way", ["module", "program"])
def test_the_end_of_the_session_ends_all_that_is_held(way: str, debug: Debug) -> None:
    if way == "module":
        editor = debug.launch("train.py", module="ddplaunch", args=["--nproc-per-node", "2", "train.py"])
    else:
        editor = debug.launch("program.py", program=str(debug.folder / "program.py"))
    editor.stopped(2)
    editor.stop()
    editor.wait()
    debug.job.wait()
    debug.job.nothing_left(patience=PATIENCE)


@pytest.mark.parametrize(
    ("end", "status", "says"),
    [
        ("raise ValueError('boom')", 1, "ValueError: boom"),
        ("sys.exit(3)", 3, "exit status 3"),
        ("os.kill(os.getpid(), 9)", 137, "SIGKILL"),
    ],
)
def test_a_rank_that_fails_ends_the_job_as_without_a_debugger(end: str, status: int, says: str, debug: Debug) -> None:
    ends = f"\n    if here == 'rank 1': {end}\n    __import__('time').sleep(600)\n"
    debug.write(TRAIN.rstrip() + ends)
    editor = debug.attach("train.py", "-m", "ddplaunch", *TWO, "train.py")
    editor.stopped(2)
    editor.go_on()
    editor.wait()
    result = debug.job.wait().expect(status)
    assert "rank 1" in result.err
    assert says in result.err
    debug.job.nothing_left(patience=PATIENCE)


class PyCharm:
    """A server that speaks pydevd's own protocol as PyCharm does: each process connects to it, and stops at one breakpoint."""

    VERSION, RUN, SUSPENDED, GO_ON, BREAK = "501", "101", "105", "106", "111"

    def __init__(self, file: Path) -> None:
        self._file = file
        self._line = 1 + next(n for n, text in enumerate(file.read_text().splitlines()) if "# BREAK" in text)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections = 0
        self.hits = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                sock, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        place = f"python-line\t{self._file}\t{self._line}\tNone\tNONE\tNone\tNone"
        with sock, suppress(OSError):
            for number, (command, text) in enumerate(
                [(self.VERSION, "1.1\tUNIX"), (self.BREAK, place), (self.RUN, "")]
            ):
                sock.sendall(f"{command}\t{2 * number + 1}\t{text}\n".encode())
            for line in sock.makefile():
                command, _, text = line.rstrip("\n").split("\t", 2)
                if command == self.SUSPENDED:
                    self.hits += 1
                    thread = re.search(r'id="([^"]+)"', unquote(text))
                    assert thread is not None
                    sock.sendall(f"{self.GO_ON}\t99\t{thread[1]}\n".encode())

    def close(self) -> None:
        """Take no more."""
        self._listener.close()


def test_each_rank_stops_under_pydevd_as_pycharm_starts_it(debug: Debug) -> None:
    ide = PyCharm(debug.folder / "train.py")
    pydevd = Path(str(importlib.util.find_spec("debugpy").origin)).parent / "_vendored/pydevd/pydevd.py"  # type: ignore[union-attr]
    given = ("--multiprocess", "--client", "127.0.0.1", "--port", ide.port, "--module", "--file", "ddplaunch")
    debug.job.command = [sys.executable, os.environ.get("DDP_TEST_PYDEVD", str(pydevd))]
    result = debug.job.run(
        *given, *TWO, "train.py", "--lr", 1, cwd=debug.folder, env={"PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    )
    ide.close()
    assert done(result.expect(0).out) == DONE
    assert (ide.hits, ide.connections) == (2, 3)
    debug.job.nothing_left()


def test_a_command_that_looks_for_something_is_no_program_to_debug_and_a_fork_of_ours_traces_nothing(
    tmp_path: Path,
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        dedent("""
        import os, subprocess, sys
        from debugpy._vendored import force_pydevd  # as debugpy has it
        import pydevd
        from _pydev_bundle import pydev_monkey
        from ddplaunch.system.process import command, fork
        print(fork.debugger_follows_children())
        pydev_monkey.patch_new_process_functions()
        pydevd.SetupHolder.setup = {"client": "127.0.0.1", "port": 9, "server": False, "multiprocess": True}
        print(fork.debugger_follows_children())
        ask = [sys.executable, "-c", "import sys; print('pydevd' in sys.modules)"]
        theirs = subprocess._fork_exec
        print(command.run(ask, dict(os.environ), 60).out.strip(), subprocess._fork_exec is theirs)
        pydevd.PyDB()
        if sys.version_info < (3, 12):
            sys.settrace(lambda *_: None)
        if (pid := fork.fork()) == 0:
            print(sys.gettrace(), pydevd.get_global_debugger(), pydevd.SetupHolder.setup["ppid"] == os.getppid(), flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        os._exit(0)
        """)
    )
    done = subprocess.run(
        [sys.executable, "-u", str(program)], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert done.stdout.splitlines() == ["False", "True", "False True", "None None True"], done.stderr
