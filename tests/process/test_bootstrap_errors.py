"""The exception that ends a program is written to the error file, by which the launcher knows the first failure."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from ddplaunch.spec import error_file
from ddplaunch.spec.outcome import Frame, WorkerError
from tests.conftest import LIGHT_TORCH, PATIENCE
from tests.forks import Forks

ROOT = Path(__file__).parents[2]
BOOTSTRAP = ROOT / "ddplaunch" / "worker" / "bootstrap.py"
PROGRAMS = ROOT / "tests" / "programs" / "bootstrap"
PYTHON = os.environ.get("DDP_TEST_PYTHON", sys.executable)  # the worker's interpreter; it may be older than ours
VERSION = subprocess.check_output([PYTHON, "-c", "import sys; print(sys.version_info.minor)"], text=True)
BEFORE_3_11 = int(VERSION) < 11
TORCH = pytest.mark.skipif(
    "DDP_TEST_PYTHON" in os.environ or importlib.util.find_spec("torch") is None, reason="torch is not installed"
)


class Worker:
    """Runs programs with an error file."""

    def __init__(self, folder: Path, cwd: Path, forks: Forks | None) -> None:
        self._cwd = cwd
        self._forks = forks
        self.script = folder / "prog.py"
        self.file = folder / "errors" / "error.json"
        self.file.parent.mkdir()

    def run(self, source: str, *args: str, file: str | None = None) -> subprocess.CompletedProcess[str]:
        self.script.write_text(dedent(source))
        return self.start("script", str(self.script), *args, file=file)

    def start(self, *argv: str, file: str | None = None, path: str = "") -> subprocess.CompletedProcess[str]:
        command = [PYTHON, str(BOOTSTRAP), *argv]
        env = {**os.environ, "PYTHONPATH": path}
        own = {"TORCHELASTIC_ERROR_FILE": str(self.file) if file is None else file}
        if self._forks is not None:
            status, out, err = self._forks.run(command, self._cwd, env, own)
            return subprocess.CompletedProcess(command, status, out.decode(), err.decode())
        return subprocess.run(
            command, cwd=self._cwd, env={**env, **own}, capture_output=True, text=True, timeout=PATIENCE, check=False
        )

    def error(self) -> WorkerError:
        """What the launcher reads; nothing else lies beside it, except for the mark that it is final."""
        assert {*os.listdir(self.file.parent)} - {"error.json.final"} == {"error.json"}
        error = error_file.read(str(self.file))
        assert error is not None
        return error

    def raw(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.file.read_text())
        return content


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture(scope="module")
def has_one_atexit() -> bool:
    """Whether all imports of `atexit` share its functions, as from Python 3.10 on: else no exception is known to be final."""
    asked = subprocess.run(
        [PYTHON, "-c", "import sys; print(sys.version_info >= (3, 10))"], capture_output=True, check=True
    )
    return asked.stdout == b"True\n"


@pytest.fixture(params=[False, True], ids=["spawned", "forked"])
def worker(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, forks: Forks
) -> Worker:
    # one folder for all: programs that are forked there have one fork server
    return Worker(tmp_path, tmp_path_factory.getbasetemp(), forks if request.param else None)


def test_an_exception_is_written_as_it_is_printed(worker: Worker) -> None:
    before = time.monotonic()
    result = worker.run("def step(x):\n    return 1 / x\n\nstep(0)\n")
    error = worker.error()
    assert result.returncode == 1
    assert (error.type, error.message) == ("ZeroDivisionError", "division by zero")
    assert error.traceback == result.stderr
    assert error.frames == (
        Frame(file=str(worker.script), line=4, function="<module>", source="step(0)"),
        Frame(file=str(worker.script), line=2, function="step", source="return 1 / x"),
    )
    assert error.at is not None
    assert before < error.at < time.monotonic()


def test_torchrun_can_read_it(worker: Worker) -> None:
    worker.run("raise ValueError('a', 'b')")
    message = worker.raw()["message"]
    assert message["message"] == "ValueError: ('a', 'b')"
    assert message["extraInfo"]["py_callstack"].endswith("ValueError: ('a', 'b')\n")
    assert abs(int(message["extraInfo"]["timestamp"]) - time.time()) < 60


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        ("class Mine(Exception): pass\nraise Mine('x')", "Mine", "x"),
        ("import json\njson.loads('{')", "json.decoder.JSONDecodeError", "Expecting property name enclosed in double quotes"),
        ("raise KeyError('key')", "KeyError", "'key'"),
        ("raise ValueError", "ValueError", ""),
        ("raise ValueError('one\\ntwo')", "ValueError", "one\ntwo"),
        ("raise ValueError('\\udc80 caf\\u00e9')", "ValueError", "? caf\u00e9"),
        ("class B(Exception):\n  def __str__(self): 1/0\nraise B", "B", "<exception str() failed>"),
        ("import sys\nsys.exit('no data at /x')", "SystemExit", "no data at /x"),
        ("raise SystemExit([1])", "SystemExit", "[1]"),
        ("raise GeneratorExit('x')", "GeneratorExit", "x"),
        ("try:\n  1/0\nexcept Exception as e:\n  raise OSError('b') from e", "OSError", "b"),
        ("import no_such_module", "ModuleNotFoundError", "No module named 'no_such_module'"),
    ],
)  # fmt: skip
def test_the_type_and_the_message_are_told(source: str, kind: str, message: str, worker: Worker) -> None:
    result = worker.run(source)
    error = worker.error()
    assert error.type == kind
    assert error.message.partition(": line")[0] == message
    if not BEFORE_3_11 and "udc80" not in source:  # until then traceback and the interpreter differed in details
        assert error.traceback == result.stderr


def test_a_custom_excepthook_does_not_hide_it(worker: Worker) -> None:
    worker.run("import sys\nsys.excepthook = lambda *_: None\nraise ValueError('x')")
    assert worker.error().message == "x"


@pytest.mark.parametrize(
    ("source", "line", "text"),
    [("x = 1\ndef (\n", 2, "def ("), ("import os\nreturn 1\n", 2, "return 1"), ("x = 1\n  y = 2\n", 2, "y = 2")],
)
def test_a_syntax_error_is_told_with_its_place(source: str, line: int, text: str, worker: Worker) -> None:
    result = worker.run(source)
    error = worker.error()
    assert error.type in ("SyntaxError", "IndentationError")
    assert error.traceback == result.stderr
    assert error.frames == (Frame(file=str(worker.script), line=line, function="<module>", source=text),)


def test_a_missing_module_is_told(worker: Worker) -> None:
    result = worker.start("module", "no_such_module")
    error = worker.error()
    assert (result.returncode, error.type) == (1, "SystemExit")
    assert error.message == result.stderr.rstrip("\n")
    assert error.message.endswith("No module named no_such_module")


@pytest.mark.parametrize(
    "source",
    [
        "",
        "raise SystemExit",
        "raise SystemExit(0)",
        "raise SystemExit(3)",
        "raise SystemExit(True)",
        "raise KeyboardInterrupt",
        "import os\nos._exit(3)",
        "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()",
        "import os\nif os.fork() == 0: raise ValueError('child')\nos.wait()",
        "import atexit\natexit.register(lambda: 1 / 0)",
    ],
)
def test_other_ends_are_not_written(source: str, worker: Worker) -> None:
    worker.run(source)
    assert not worker.file.exists()


def test_a_forked_child_leaves_the_file_to_its_parent(worker: Worker) -> None:
    worker.run("import os\nif os.fork() == 0: raise ValueError('child')\nos.wait()\nraise KeyError('parent')")
    assert worker.error().type == "KeyError"


@pytest.mark.parametrize("file", ["", "/nowhere/error.json", "/dev/null/error.json", "/proc/error.json"])
def test_a_file_that_cannot_be_written_changes_nothing(file: str, worker: Worker) -> None:
    result = worker.run("raise ValueError('x')", file=file)
    assert result.returncode == 1
    assert result.stderr.endswith("ValueError: x\n")
    assert "bootstrap" not in result.stderr
    assert not worker.file.exists()


def test_a_full_disk_leaves_no_half_of_a_file(worker: Worker) -> None:
    worker.run("import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))\nraise ValueError('x')")
    assert not worker.file.exists()


def test_a_program_that_changes_its_environment_fails_into_the_same_file(worker: Worker) -> None:
    worker.run("import os\nos.environ['TORCHELASTIC_ERROR_FILE'] = '/nowhere'\nraise ValueError('x')")
    assert worker.error().message == "x"


@pytest.mark.parametrize("letter", ["x", "\\x00", "\\U0001F600"])
def test_a_file_is_never_larger_than_what_is_read_of_it(letter: str, worker: Worker) -> None:
    source = f"def f(n):\n    if n: f(n - 1)\n    raise ValueError('{letter}' * 10_000_000)\nf(500)\n"
    worker.run(f"# {'~' * 1000}\n{source}")
    assert worker.file.stat().st_size <= error_file.LIMIT
    error = worker.error()
    assert "characters left out" in error.message
    assert "characters left out" in error.traceback
    assert error.frames[0].function == "<module>"
    assert error.frames[-1].line == 4


@TORCH
@pytest.mark.parametrize("worker", [False], indirect=True, ids=["spawned"])  # forked: tests/torch/test_drop_in.py
def test_torchs_record_and_ours_agree(worker: Worker) -> None:
    worker.start("script", str(PROGRAMS / "recorded.py"), path=LIGHT_TORCH)
    error = worker.error()
    assert (error.type, error.message) == ("Unusual", "watched")
    assert error.frames[0].source == "main()"
    assert worker.raw()["message"]["message"] == "Unusual: watched"


@TORCH
@pytest.mark.parametrize("worker", [True], indirect=True, ids=["forked"])
def test_an_exception_that_was_survived_is_not_what_ended_the_program(worker: Worker) -> None:
    worker.start("script", str(PROGRAMS / "recorded.py"), "elsewhere", path=LIGHT_TORCH)
    assert worker.error().type == "KeyError"


def test_the_report_of_a_child_that_torch_has_passed_on_is_kept(worker: Worker) -> None:
    worker.file.write_text('{"message": {"message": "RuntimeError: in the child"}}')
    worker.run("class ChildFailedError(Exception): pass\nraise ChildFailedError('a table')")
    assert worker.error().message == "in the child"


@pytest.mark.parametrize(
    ("source", "is_final"),
    [
        ("raise ValueError", True),
        ("import sys\nsys.exit('usage')", True),
        ("", False),
        ("import sys\nsys.exit(0)", False),
        ("import os, sys\nsys.excepthook = lambda *_: os._exit(1)\nraise ValueError", False),
        ("import atexit, os\natexit.register(os._exit, 1)\nraise ValueError", False),
        ("import os, threading\nthreading.Thread(target=os._exit, args=[1]).start()\nraise ValueError", False),
        ("import os\nif os.fork() == 0: raise ValueError\nos.wait()", False),
    ],
    ids=[
        "exception",
        "exit with a text",
        "end",
        "exit",
        "left by a hook",
        "left at exit",
        "left by a thread",
        "a child",
    ],
)
def test_an_exception_is_final_once_nothing_of_the_program_can_run_any_more(
    worker: Worker, source, is_final, has_one_atexit
):
    worker.run(source)
    assert worker.file.with_name("error.json.final").exists() is (is_final and has_one_atexit)


def test_nothing_of_the_program_runs_after_its_exception_is_final(worker: Worker, has_one_atexit: bool) -> None:
    final = worker.file.with_name("error.json.final")
    look = f"import atexit, os\nlook = lambda when: print(when, os.path.exists({str(final)!r}), flush=True)\n"
    thread = "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), look('thread'))).start()\n"
    hooks = "import sys\natexit.register(look, 'at exit')\nsys.excepthook = lambda *_: look('hook')\n"
    result = worker.run(f"{look}{hooks}{thread}raise ValueError")
    assert result.stdout.splitlines() == ["hook False", "thread False", "at exit False"]
    assert final.exists() is has_one_atexit
