"""A hook of ours and one of somebody else at the same place: both work, whichever came first, and whichever goes first."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from ddplaunch.system.process.linux import bounded_file
from tests.conftest import PATIENCE, Job

BOOTSTRAP = Path(__file__).parents[2] / "ddplaunch" / "worker" / "bootstrap.py"
PYTHON = os.environ.get("DDP_TEST_PYTHON", sys.executable)  # the worker's interpreter; it may be older than ours


class Worker:
    """A program that runs as a worker, with a package `torch` that has as much of torch as the bootstrap knows of."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.slow = folder / "slow"
        self.stacks = bounded_file("ddplaunch-stacks", 1 << 16)
        self.write("site-packages/torch/__init__.py", "from . import cuda\nimport time; time.sleep(0.6)")
        self.write(
            "site-packages/torch/cuda.py",
            """
            queued, chosen = [], []
            _lazy_call = queued.append
            set_device = chosen.append
            device_count = lambda: 4
            def init():
                for call in queued: call()
            """,
        )

    def write(self, name: str, source: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(source))
        return path

    def run(self, program: str, *, before: str = "", **env: str) -> list[str]:
        """Run a program, with `before` at the start of its interpreter; return the lines that it printed."""
        self.write("site-packages/sitecustomize.py", before)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CUDA", "COV"))}
        done = subprocess.run(
            [PYTHON, str(BOOTSTRAP), "script", str(self.write("train.py", program))],
            env={
                **kept,
                "PYTHONPATH": str(self.folder / "site-packages"),
                "DDPLAUNCH_PIN_DEVICE": "cuda:2",
                "DDPLAUNCH_SLOW_IMPORTS": str(self.slow),
                **env,
            },
            pass_fds=[self.stacks],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout.splitlines()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    made = Worker(tmp_path)
    yield made
    os.close(made.stacks)


# finders of others that watch how torch and torch.cuda are executed, each in a way of its own, and print that
FINDERS = {
    "replaces a function of the loader for a while": """
        import sys
        class Finder:
            searching = False
            def find_spec(self, name, path=None, target=None):
                if self.searching or name.partition(".")[0] != "torch": return None
                import importlib.util
                Finder.searching = True
                try:
                    spec = importlib.util.find_spec(name)
                finally:
                    Finder.searching = False
                loader, execute = spec.loader, spec.loader.exec_module
                def exec_module(module):
                    del loader.exec_module
                    execute(module)
                    print("theirs:", name)
                loader.exec_module = exec_module
                return spec
        sys.meta_path.insert(0, Finder())
        """,
    "has a loader in front for good": """
        import sys
        class Front:
            def __init__(self, loader): self.loader = loader
            def __getattr__(self, name): return getattr(self.loader, name)
            def exec_module(self, module):
                self.loader.exec_module(module)
                print("theirs:", module.__name__)
        class Finder:
            searching = False
            def find_spec(self, name, path=None, target=None):
                if self.searching or name.partition(".")[0] != "torch": return None
                Finder.searching = True
                try:
                    for finder in sys.meta_path:
                        spec = finder.find_spec(name, path, target)
                        if spec is not None: break
                finally:
                    Finder.searching = False
                spec.loader = Front(spec.loader)
                return spec
        sys.meta_path.insert(0, Finder())
        """,
    "takes itself away": """
        import sys
        class Finder:
            def __init__(self, name): self.name = name
            def find_spec(self, name, path=None, target=None):
                if name != self.name: return None
                sys.meta_path.remove(self)
                print("theirs:", name)
        sys.meta_path[:0] = [Finder("torch"), Finder("torch.cuda")]
        """,
}
TRAINS = """
    import torch.cuda
    torch.cuda.init()
    print("ours:", torch.cuda.chosen)
    """


# one that takes itself away hides the finder behind it from that import: ours, if it is the last to come
ORDERS = [(way, first) for way in FINDERS for first in (True, False) if first or way != "takes itself away"]


@pytest.mark.parametrize(("way", "is_first"), ORDERS)
def test_imports_are_watched_by_us_and_by_others(way: str, is_first: bool, worker: Worker) -> None:
    theirs = dedent(FINDERS[way])
    program = ("" if is_first else theirs) + dedent(TRAINS)
    lines = worker.run(program, before=theirs if is_first else "")
    assert sorted(lines) == ["ours: [2]", "theirs: torch", "theirs: torch.cuda"]
    assert worker.slow.read_text().split()[0] == "torch"


def test_a_finder_of_others_is_asked_for_the_module_that_we_wait_for(worker: Worker) -> None:
    worker.write("elsewhere/torch.py", "found = 'by them'")
    theirs = f"""
        import sys, importlib.util
        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name == "torch":
                    return importlib.util.spec_from_file_location(name, {str(worker.folder / "elsewhere/torch.py")!r})
        sys.meta_path.insert(0, Finder())
        """
    lines = worker.run("import torch; print(torch.found)", before=dedent(theirs), MASTER_PORT="29500")
    assert lines == ["by them"]


def test_a_program_that_looks_for_torch_and_imports_it_later_has_it_set_up(worker: Worker) -> None:
    worker.write("site-packages/torch/__init__.py", "")
    looks = """
        from importlib import machinery, util
        spec = util.find_spec("torch.cuda")
        print(isinstance(spec.loader, machinery.SourceFileLoader), spec.loader.get_filename() == spec.origin)
        """
    assert worker.run(dedent(looks) + dedent(TRAINS)) == ["True True", "ours: [2]"]


def test_a_lazy_loader_of_the_program_loads_what_we_watch(worker: Worker) -> None:
    program = """
        import importlib.util, sys
        spec = importlib.util.find_spec("torch")
        spec.loader = importlib.util.LazyLoader(spec.loader)
        torch = importlib.util.module_from_spec(spec)
        sys.modules["torch"] = torch
        spec.loader.exec_module(torch)
        torch.cuda.init()
        print("ours:", torch.cuda.chosen)
        """
    assert worker.run(program) == ["ours: [2]"]


def test_a_list_of_finders_that_the_program_replaces_does_no_harm(worker: Worker) -> None:
    program = "import sys\nsys.meta_path = [finder for finder in sys.meta_path if hasattr(finder, '__name__')]\n"
    assert worker.run(program + dedent(TRAINS)) == ["ours: []"]


def test_where_faults_are_written_is_as_the_interpreter_was_told_before(worker: Worker) -> None:
    before = f"import faulthandler; file = open({str(worker.folder / 'faults')!r}, 'w'); faulthandler.enable(file)"
    program = "import faulthandler, sys; print(faulthandler.is_enabled()); faulthandler._sigabrt()"
    with pytest.raises(AssertionError):
        worker.run(program, before=before)
    assert "Fatal Python error: Aborted" in (worker.folder / "faults").read_text()


@pytest.mark.parametrize("theirs", ["signal.signal({}, handler)", "faulthandler.register({}, file=open({!r}, 'w'))"])
@pytest.mark.parametrize("of", ["stacks", "debugger"])
def test_a_signal_that_the_interpreter_has_at_its_start_is_not_taken_from_it(
    theirs: str, of: str, worker: Worker
) -> None:
    signum = int(signal.SIGRTMAX) - 5
    heard = worker.folder / "heard"
    before = f"""
        import faulthandler, signal
        handler = lambda *_: print("theirs", file=open({str(heard)!r}, "w"), flush=True)
        {theirs.format(signum, str(heard))}
        """
    program = f"""
        import os, signal
        signal.raise_signal({signum})
        print(os.path.exists("/proc/self/fd/{worker.stacks}"))
        """
    of_ours = {"DDPLAUNCH_STACKS": f"{worker.stacks},{signum if of == 'stacks' else signum - 1}"}
    if of == "debugger":
        of_ours["DDPLAUNCH_DEBUGGER"] = f"nobody,{signum},"
    assert worker.run(program, before=dedent(before), **of_ours) == [str(of == "debugger")]
    assert heard.read_text()


DEBUGGED = """
    import os, socket, sys
    client, agent = socket.socketpair()
    session = names["Session"](names["Client"](client, agent))
    names["Session"].ours = lambda *_: None
    def theirs(*_): return None
    """


@pytest.mark.parametrize(("tracer", "left"), [("session.ours", "None"), ("theirs", "theirs")])
def test_a_debugger_that_is_left_ends_no_trace_of_another_tool(tracer: str, left: str, worker: Worker) -> None:
    names = f"""
        from importlib.machinery import SourceFileLoader
        names = {{"__name__": "debugger"}}
        exec(SourceFileLoader("debugger", {str(BOOTSTRAP.parent / "debugger.py")!r}).get_code("debugger"), names)
        """
    program = f"""
        sys.settrace({tracer})
        if os.fork() == 0:
            session.client.forget()
            print(getattr(sys.gettrace(), "__name__", None), flush=True)
            os._exit(0)
        os.wait()
        """
    assert worker.run(dedent(names) + dedent(DEBUGGED) + dedent(program)) == [left]


def test_no_timer_that_a_tool_around_the_command_starts_in_each_process_goes_on_in_a_worker(job: Job) -> None:
    tool = """
        import os, signal
        timers = signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF
        os.register_at_fork(after_in_child=lambda: [signal.setitimer(timer, 600) for timer in timers])
        """
    program = """
        import signal
        print([signal.getitimer(timer) for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)])
        """
    (job.home / "sitecustomize.py").write_text(dedent(tool))
    (job.home / "train.py").write_text(dedent(program))
    result = job.run("--nproc-per-node", 1, "train.py", env={"PYTHONPATH": str(job.home)}).expect(0)
    assert result.out == f"{3 * [(0.0, 0.0)]}\n"
    job.nothing_left()
