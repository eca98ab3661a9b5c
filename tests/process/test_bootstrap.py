"""Each program runs under plain python and under the bootstrap, and shows no difference."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import dedent

import pytest

from tests.capabilities import bound_by_modes
from tests.conftest import LIGHT_TORCH, PATIENCE
from tests.forks import Forks

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "ddplaunch" / "worker"
PROGRAMS = ROOT / "tests" / "programs" / "bootstrap"
PYTHON = os.environ.get("DDP_TEST_PYTHON", sys.executable)  # the worker's interpreter; it may be older than ours
VERSION = subprocess.check_output([PYTHON, "-c", "import sys; print(sys.version_info.minor)"], text=True)
BEFORE_3_11 = int(VERSION) < 11
OTHER_PYTHON = pytest.mark.skipif("DDP_TEST_PYTHON" in os.environ, reason="it is not installed for DDP_TEST_PYTHON")

Outcome = tuple[int, str, str]
FORKS = Forks()


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[None]:
    yield
    FORKS.close()


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all cases of a test: those that are forked there have one fork server."""
    path: Path = tmp_path_factory.getbasetemp() / request.function.__name__
    path.mkdir(exist_ok=True)
    return path


def run(*command: object, cwd: Path, stdin: str = "", env: Mapping[str, str] | None = None) -> Outcome:
    """The exit status, stdout and stderr of a command, without the addresses of objects."""
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        input=stdin.encode(),
        env={**surroundings(), **(env or {})},
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    return result.returncode, without_addresses(result.stdout), without_addresses(result.stderr)


def surroundings() -> dict[str, str]:
    """The environment, without variables that are about Python."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TORCHELASTIC", "DDPLAUNCH", "COV"))}
    return {**kept, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def without_addresses(printed: bytes) -> str:
    return re.sub(rb"0x[0-9a-f]{8,}", b"0x", printed).decode(errors="replace")


def same(
    kind: str, target: object, *args: str, cwd: Path, stdin: str = "", env: Mapping[str, str] | None = None
) -> Outcome:
    """What the program does under plain python, having proven that it does the same under the bootstrap and when forked."""
    plain = run(PYTHON, *(["-m"] if kind == "module" else []), target, *args, cwd=cwd, stdin=stdin, env=env)
    ours = [PYTHON, str(WORKER / "bootstrap.py"), kind, str(target), *args]
    assert run(*ours, cwd=cwd, stdin=stdin, env=env) == plain
    status, out, err = FORKS.run(ours, cwd, {**surroundings(), **(env or {})}, {}, stdin.encode())
    assert (status, without_addresses(out), without_addresses(err)) == plain
    return plain


def write(path: Path, source: str) -> Path:
    """Write a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(source))
    return path


# --- programs that are one file

ENDINGS = {
    "does nothing": "",
    "prints": "import sys; print('out'); print('err', file=sys.stderr)",
    "writes without a newline": "import sys; sys.stdout.write('half a line')",
    "exits with 3": "import sys; sys.exit(3)",
    "exits with a string": "import sys; sys.exit('no data at /x')",
    "exits with None": "import sys; sys.exit(None)",
    "exits with 0": "raise SystemExit(0)",
    "exits with True": "raise SystemExit(True)",
    "exits with an object": "raise SystemExit(['a', 'list'])",
    "exits with 256": "raise SystemExit(256)",
    "exits with -1": "raise SystemExit(-1)",
    "calls exit()": "exit(4)",
    "calls os._exit": "import os; os._exit(5)",
    "raises": "def f():\n    raise RuntimeError('boom')\nf()",
    "raises with several lines": "raise ValueError('one\\ntwo\\n')",
    "raises without a message": "raise ValueError",
    "fails an assertion": "assert 1 == 2, 'really'",
    "raises a class of its own": "class Mine(Exception): pass\nraise Mine('x')",
    "raises from another": "try:\n    1 / 0\nexcept Exception as e:\n    raise RuntimeError('b') from e",
    "raises while handling": "try:\n    1 / 0\nexcept Exception:\n    undefined",
    "raises with the context hidden": "try:\n    1 / 0\nexcept Exception:\n    raise RuntimeError('b') from None",
    "raises again": "try:\n    1 / 0\nexcept Exception as e:\n    error = e\nraise error",
    "raises a group": "raise ExceptionGroup('two', [ValueError(1), ExceptionGroup('inner', [TypeError(2)])])",
    "raises with notes": "e = ValueError('x')\ne.add_note('a note')\ne.add_note('another')\nraise e",
    "raises what cannot be printed": (
        "class Bad(Exception):\n    def __str__(self):\n        raise ValueError\nraise Bad"
    ),
    "raises a lone surrogate": "raise ValueError('\\udc80')",
    "raises GeneratorExit": "raise GeneratorExit('x')",
    "cannot import": "import no_such_module",
    "imports what cannot be compiled": "import broken",
    "imports what raises": "import raising",
    "imports by name what raises": "import importlib; importlib.import_module('raising')",
    "has an excepthook": """
        import sys, traceback
        def hook(kind, value, tb):
            print("hook", kind, value, [f.name for f in traceback.extract_tb(tb)], value.__traceback__ is tb)
            print(sys.last_value is value, sys.last_traceback is tb, sys.exc_info())
        sys.excepthook = hook
        def f(): raise ValueError("x")
        f()
        """,
    "has an excepthook that raises": """
        import sys
        def hook(kind, value, tb):
            raise TypeError("in the hook")
        sys.excepthook = hook
        raise ValueError("x")
        """,
    "has an excepthook that exits": """
        import sys
        sys.excepthook = lambda *_: sys.exit(7)
        raise ValueError("x")
        """,
    "is interrupted": """
        import os, signal
        signal.signal(signal.SIGINT, signal.default_int_handler)
        def f(): os.kill(os.getpid(), signal.SIGINT)
        f()
        """,
    "is terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "catches Ctrl-C and exits": """
        import os, signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            sys.exit("interrupted")
        """,
    "exits in an order": """
        import atexit, threading
        class Last:
            def __del__(self): print("deleted")
        last = Last()
        atexit.register(print, "first registered")
        atexit.register(print, "second registered")
        go = threading.Event()
        threading.Thread(target=lambda: (go.wait(), print("thread"))).start()
        print("end of main")
        go.set()
        """,
    "exits in an order after an exception": """
        import atexit
        class Last:
            def __del__(self): print("deleted")
        last = Last()
        atexit.register(lambda: print("atexit", __name__, type(last)))
        raise ValueError("x")
        """,
    "exits in an order after SystemExit": """
        import atexit, sys
        class Last:
            def __del__(self): print("deleted")
        last = Last()
        atexit.register(print, "atexit")
        sys.exit(9)
        """,
    "raises at exit": "import atexit\n@atexit.register\ndef f(): raise ValueError('late')",
    "raises in a thread": """
        import threading
        def f(): raise ValueError("in a thread")
        t = threading.Thread(target=f); t.start(); t.join()
        print("main goes on")
        """,
    "exits in a thread": "import sys, threading; threading.Thread(target=sys.exit, args=(3,)).start()",
    "forks and raises in the child": """
        import os
        if os.fork() == 0:
            raise ValueError("child")
        print(os.wait()[1])
        """,
    "forks and returns in the child": "import os\nif os.fork():\n    os.wait()\n    print('parent')\nelse:\n    print('child')",
    "pickles its own class": """
        import atexit, pickle
        from dataclasses import dataclass, asdict
        @dataclass
        class Point:
            x: int
        def show(): print(asdict(pickle.loads(pickle.dumps(Point(1)))), pickle.dumps(Point(1), 0))
        show()
        atexit.register(show)
        """,
    "shows its own source": "import inspect\ndef f():\n    return 1  # one\nprint(inspect.getsource(f), inspect.getfile(f))",
    "annotates": "x: int = 1\nprint(__annotations__)",
    "has a docstring": "'''A docstring.'''\nprint(__doc__)",
    "shadows builtins": "exec = compile = BaseException = error = None\nimport sys\nsys = 1\n1 / 0",
    "replaces __main__": "import sys\nsys.modules['__main__'] = None\nraise ValueError('x')",
    "deletes __main__": "import sys\ndel sys.modules['__main__']\nraise ValueError('x')",
    "deletes all it has": "globals().clear()",
    "deletes all it has and fails": "g = globals()\ng.clear()\nraise ValueError",
    "collects garbage and fails": """
        import gc, sys
        def hook(*args):
            for name in ("last_type", "last_value", "last_traceback", "last_exc"):
                if hasattr(sys, name):
                    delattr(sys, name)
            del args
            print(gc.collect() >= 0)
        sys.excepthook = hook
        raise ValueError
        """,
    "warns": "import warnings\nwarnings.warn('careful')",
    "raises one error object twice": "e = ValueError('x')\ntry:\n    raise e\nexcept ValueError:\n    pass\nraise e",
    "closes stdout": "import sys\nsys.stdout.close()\nraise ValueError('x')",
    "closes stderr": "import sys\nsys.stderr.close()\nraise ValueError('x')",
    "has no builtins left": "import builtins\ndel builtins.exec, builtins.open\nraise ValueError('x')",
    "dies of too many open files": """
        import os, resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
        held = []
        while True:
            held.append(open(os.devnull))
        """,
    "sets a new handler for faults": "import faulthandler, sys\nfaulthandler.disable()\nprint(faulthandler.is_enabled())",
}


@pytest.mark.parametrize("source", ENDINGS.values(), ids=ENDINGS)
def test_a_program_ends_and_prints_as_under_plain_python(source: str, folder: Path) -> None:
    write(folder / "broken.py", "x = (")
    write(folder / "raising.py", "def f(): raise KeyError('key')\nf()")
    if BEFORE_3_11 and source == ENDINGS["has an excepthook that raises"]:
        pytest.skip("before Python 3.11 a frame of ours is seen there")
    script = write(folder / "prog.py", source)
    same("script", script, "--flag", cwd=folder)


SPELLINGS = {
    "not Python": b"def (",
    "an indent too much": b"x = 1\n  y = 2\n",
    "tabs and spaces": b"if 1:\n        x = 1\n\ty = 2\n",
    "an open string": b"x = 'abc\n",
    "an open bracket": b"x = (1,\n\n",
    "return at the top": b"import os\nreturn 1\n",
    "a null byte": b"x = 1\n\0\n",
    "an unknown encoding": b"# coding: klingon\nx = 1\n",
    "not UTF-8": b"x = 1\ny = '\xe9'\n",
    "two encodings": b"\xef\xbb\xbf# coding: latin-1\nx = 1\n",
    "nested too deeply": b"x = " + b"(" * 300 + b"1" + b")" * 300,
    "a future feature too late": b"x = 1\nfrom __future__ import annotations\n",
    "an unknown future": b"from __future__ import braces\n",
    "latin-1": b"# coding: latin-1\nprint(ascii('\xe9'))\n",
    "a byte order mark": b"\xef\xbb\xbfprint(1)\n",
    "CR LF": b"print(1)\r\nif 1:\r\n    1 / 0\r\n",
    "no last newline": b"if 1:\n    print(1)",
    "a form feed": b"\x0cprint(1)\n",
    "a #! line": b"#!/usr/bin/env python\nprint(1)\n",
    "a doubtful escape": b"print('\\d')\n",
    "a doubtful comparison": b"x = 1\nprint(x is 1)\n",
    "a future feature": b"from __future__ import annotations\ndef f(x: undefined): pass\nprint(f.__annotations__)\n",
    "no future feature of ours": b"def f(x: int): pass\nprint(f.__annotations__)\n",
}


@pytest.mark.parametrize("content", SPELLINGS.values(), ids=SPELLINGS)
def test_a_script_is_read_or_refused_as_by_plain_python(content: bytes, folder: Path) -> None:
    if int(VERSION) == 8 and content == SPELLINGS["nested too deeply"]:
        pytest.skip("the parser of Python 3.8 prints a line on stderr each time")
    (folder / "prog.py").write_bytes(content)
    same("script", "prog.py", cwd=folder)


def test_a_recursion_error_is_shown_alike_but_for_the_one_frame_of_ours(tmp_path: Path) -> None:
    script = write(tmp_path / "prog.py", "def f():\n    f()\nf()\n")
    plain = run(PYTHON, script, cwd=tmp_path)
    ours = run(PYTHON, WORKER / "bootstrap.py", "script", script, cwd=tmp_path)
    uncounted = [re.sub(r"repeated \d+ more times", "repeated", err) for _, _, err in (plain, ours)]
    assert "RecursionError" in uncounted[0]
    assert uncounted[0] == uncounted[1]
    assert ours[0] == plain[0] == 1


# --- where the program lies and how it is named


def lay_out(folder: Path) -> None:
    """Have facts.py be a file, a link, a package and part of an archive."""
    facts = PROGRAMS / "facts.py"
    shutil.copy(facts, folder / "facts.py")
    shutil.copy(facts, folder / "no suffix")
    (folder / "package").mkdir()
    shutil.copy(facts, folder / "package" / "__main__.py")
    (folder / "deep").mkdir()
    (folder / "deep" / "link.py").symlink_to("../facts.py")
    (folder / "deep" / "chain.py").symlink_to("link.py")
    with zipfile.ZipFile(folder / "archive.zip", "w") as archive:
        archive.write(facts, "__main__.py")
        archive.write(facts, "package/__main__.py")
    (folder / "prefixed").write_bytes(b"#!/usr/bin/env python3\n" + (folder / "archive.zip").read_bytes())


@pytest.mark.parametrize(
    ("target", "where"),
    [
        ("facts.py", "."),
        ("./facts.py", "."),
        ("../facts.py", "deep"),
        ("deep/../facts.py", "."),
        (".//facts.py", "."),
        ("{root}/facts.py", "deep"),
        ("link.py", "deep"),
        ("deep/link.py", "."),
        ("deep/chain.py", "."),
        ("no suffix", "."),
        ("package", "."),
        ("package/", "."),
        (".", "package"),
        ("./package", "."),
        ("{root}/package", "deep"),
        ("archive.zip", "."),
        ("archive.zip/package", "."),
        ("prefixed", "."),
    ],
)
def test_a_program_knows_where_it_is(target: str, where: str, folder: Path) -> None:
    if not any(folder.iterdir()):
        lay_out(folder)
    status, out, _ = same("script", target.format(root=folder), "a", "-b", "--c=d", "", cwd=folder / where)
    assert status == 0
    assert "main True True" in out


@pytest.mark.parametrize("variables", [{}, {"PYTHONSAFEPATH": "1"}, {"PYTHONPATH": "/nowhere:package"}])
@pytest.mark.parametrize(
    ("kind", "target"),
    [("script", "prog.py"), ("script", "package"), ("module", "package"), ("module", "package.inner")],
)
def test_a_program_finds_what_lies_beside_it(kind: str, target: str, variables: dict[str, str], folder: Path) -> None:
    shutil.copy(PROGRAMS / "facts.py", folder / "facts.py")
    write(folder / "prog.py", "import sys\nprint(sys.path)\nimport facts")
    write(
        folder / "package" / "__init__.py",
        "import sys\nprint('init', sys.argv, sys.path, vars(sys.modules['__main__']).get('__file__'))",
    )
    write(folder / "package" / "__main__.py", "import sys\nprint(sys.path, __package__)\nimport facts")
    write(folder / "package" / "inner.py", "from . import other\nprint(__spec__, sorted(vars()))\nother.f()")
    write(folder / "package" / "other.py", "def f(): raise ValueError('relative')")
    same(kind, target, "a", "-m", cwd=folder, env=variables)


@pytest.mark.parametrize(
    "target", ["prog", "package.inner", "package", "no_such", "package.no_such", "prog.py", "json.tool", "this"]
)
def test_a_module_runs_as_under_plain_python(target: str, folder: Path) -> None:
    write(folder / "prog.py", "import sys\nprint(__name__, __file__, sys.argv, __spec__.name)\n1 / 0")
    write(folder / "package" / "__init__.py", "")
    write(folder / "package" / "inner.py", "from .other import f\nf()")
    write(folder / "package" / "other.py", "def f(): raise ValueError('relative')")
    same("module", target, "a", cwd=folder)


def test_a_module_that_cannot_be_compiled_is_refused_as_by_plain_python(tmp_path: Path) -> None:
    write(tmp_path / "prog.py", "def (")
    same("module", "prog", cwd=tmp_path)


@pytest.mark.parametrize(
    "target", ["missing.py", "missing/prog.py", "file/prog.py", "loop.py", "x" * 300, "empty", "bad.zip", ""]
)
def test_what_cannot_be_opened_is_refused_as_by_plain_python(target: str, folder: Path) -> None:
    write(folder / "file", "")
    if not (folder / "empty").exists():
        (folder / "empty").mkdir()
        (folder / "loop.py").symlink_to("loop.py")
    with zipfile.ZipFile(folder / "bad.zip", "w") as archive:
        archive.writestr("other.py", "")
    assert same("script", target, cwd=folder)[0] in (1, 2)


def test_an_unreadable_script_is_refused_as_by_plain_python(tmp_path: Path) -> None:
    write(tmp_path / "prog.py", "print(1)").chmod(0)
    with bound_by_modes():
        assert same("script", "prog.py", cwd=tmp_path)[0] == 2


@pytest.mark.parametrize("name", ["prog.pyc", "compiled"])
def test_a_compiled_script_runs(name: str, folder: Path) -> None:
    write(folder / "prog.py", "print(__file__, type(__loader__).__name__, __cached__)\n1 / 0")
    run(PYTHON, "-c", f"import py_compile; py_compile.compile('prog.py', {name!r})", cwd=folder)
    assert "SourcelessFileLoader" in same("script", name, cwd=folder)[1]


def test_a_compiled_script_of_another_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "prog.pyc").write_bytes(b"\1\2\r\n" + bytes(12))
    same("script", "prog.pyc", cwd=tmp_path)


def test_a_script_comes_from_stdin_or_a_pipe(tmp_path: Path) -> None:
    same("script", "/dev/stdin", "a", cwd=tmp_path, stdin="import sys\nprint(sys.argv, __file__)\n1 / 0\n")
    same("script", "/dev/stdin", cwd=tmp_path, stdin="def (\n")


# --- what others do with `__main__`


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
@pytest.mark.parametrize(("kind", "target"), [("script", "spawns.py"), ("module", "spawns"), ("module", "pack.spawns")])
def test_its_classes_reach_the_processes_that_it_starts(kind: str, target: str, method: str, folder: Path) -> None:
    for place in ("spawns.py", "pack/spawns.py"):
        (folder / place).parent.mkdir(exist_ok=True)
        shutil.copy(PROGRAMS / "spawns.py", folder / place)
    status, out, _ = same(kind, target, method, cwd=folder)
    assert status == 0
    assert out.count("main__', 2") == 1


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@OTHER_PYTHON
@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_its_data_set_reaches_the_data_loader(method: str, tmp_path: Path) -> None:
    script = shutil.copy(PROGRAMS / "loads.py", tmp_path / "loads.py")
    ours = run(PYTHON, WORKER / "bootstrap.py", "script", script, method, cwd=tmp_path, env={"PYTHONPATH": LIGHT_TORCH})
    assert ours == (0, "[[0, 1], [4, 9], [16, 25]] __main__\n", "")


@pytest.mark.skipif(importlib.util.find_spec("coverage") is None, reason="coverage is not installed")
@OTHER_PYTHON
def test_coverage_measures_it(tmp_path: Path) -> None:
    write(
        tmp_path / "prog.py",
        "import sys\ndef f(x):\n    if x:\n        return 1\n    return 2\nprint(f(1), sys.argv, __file__)\n",
    )
    same("module", "coverage", "run", "--data-file=first", "prog.py", "a", cwd=tmp_path)
    report = same("module", "coverage", "report", "-m", "--data-file=first", cwd=tmp_path)
    assert re.search(r"prog.py +6 +1 +83% +5", report[1])


@pytest.mark.parametrize("commands", ["p x\nl\nq\n", "p x\nc\n", "n\nn\np x\nc\n", ""])
def test_the_debugger_stops_in_it(commands: str, folder: Path) -> None:
    write(folder / "prog.py", "x = 1\nbreakpoint()\nx = 2\nx = 3\nx = 4\n")
    assert "prog.py" in same("script", "prog.py", cwd=folder, stdin=commands)[1]


def test_closed_streams_do_no_harm(tmp_path: Path) -> None:
    script = write(
        tmp_path / "prog.py", "import sys\nprint(sys.stdin, sys.stdout is None, sys.stderr)\nraise ValueError"
    )
    for closed in ("2>&-", "1>&-", "<&- >&- 2>&-"):
        plain = run("sh", "-c", f'exec "$@" {closed}', "sh", PYTHON, script, cwd=tmp_path)
        bootstrap = WORKER / "bootstrap.py"
        ours = run("sh", "-c", f'exec "$@" {closed}', "sh", PYTHON, bootstrap, "script", script, cwd=tmp_path)
        assert ours == plain


def test_a_removed_working_directory_does_no_harm(tmp_path: Path) -> None:
    script = write(tmp_path / "prog.py", "import sys\nprint(sys.path)\n")
    write(tmp_path / "lib" / "prog2.py", "import sys\nprint(sys.path)\n")
    for kind, target in (("script", script), ("module", "prog2"), ("script", "prog.py")):
        outcomes = []
        for command in (["-m"] if kind == "module" else [], [WORKER / "bootstrap.py", kind]):
            (tmp_path / "gone").mkdir()
            line = ["sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", PYTHON, *command, target]
            outcomes.append(run(*line, cwd=tmp_path / "gone", env={"PYTHONPATH": str(tmp_path / "lib")}))
        assert outcomes[0] == outcomes[1]


# --- ourselves


def test_a_fault_shows_the_stacks(tmp_path: Path) -> None:
    script = write(tmp_path / "prog.py", "import os, signal\ndef f():\n    os.kill(os.getpid(), signal.SIGSEGV)\nf()")
    status, _, err = run(PYTHON, WORKER / "bootstrap.py", "script", script, cwd=tmp_path)
    assert status == -11
    assert "Fatal Python error: Segmentation fault" in err
    assert f'File "{script}", line 3 in f' in err


def test_its_code_is_cached_where_it_can_be(tmp_path: Path) -> None:
    script = write(tmp_path / "prog.py", "print('ran')")
    shutil.copytree(WORKER, tmp_path / "cached", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(WORKER, tmp_path / "not cached", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "not cached" / "__pycache__").touch()  # not a folder: not even root can write into it
    for folder in ("cached", "not cached"):
        bootstrap = tmp_path / folder / "bootstrap.py"
        ours = run(PYTHON, bootstrap, "script", script, cwd=tmp_path, env={"PYTHONDONTWRITEBYTECODE": ""})
        assert ours == (0, "ran\n", "")
    cached = {path.name.split(".")[0] for path in (tmp_path / "cached" / "__pycache__").iterdir()}
    assert cached == {"lifecycle"}
