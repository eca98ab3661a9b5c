"""Functions as jobs in a notebook: a real Jupyter kernel, with cells as a user types them."""

import re
import signal
from importlib.util import find_spec

import pytest

from tests.conftest import PATIENCE
from tests.process.calling import Program

MISSING = [name for name in ("ipykernel", "jupyter_client", "cloudpickle") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}, of the extra `test`")


class Kernel:
    """A kernel, and what a front end sees of it."""

    def __init__(self, program: Program) -> None:
        from jupyter_client.manager import KernelManager

        for name in ("state", "tmp", "signs"):
            (program.home / name).mkdir()
        self.manager = KernelManager(kernel_name="python3")
        apart = {"IPYTHONDIR": str(program.home / "ipython"), "JUPYTER_RUNTIME_DIR": str(program.home / "jupyter")}
        self.manager.start_kernel(env={**program.env, **apart}, cwd=str(program.home))
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)

    def run(self, cell: str, *, meanwhile=None) -> dict[str, str]:
        """Run a cell and do `meanwhile`; give what it shows: "stdout", "stderr", "result", "error"."""
        message = self.client.execute(cell)
        if meanwhile is not None:
            meanwhile()
        shown = {"stdout": "", "stderr": "", "result": "", "error": "", "name": ""}
        while True:
            said = self.client.get_iopub_msg(timeout=PATIENCE)
            if said["parent_header"].get("msg_id") != message:
                continue
            content = said["content"]
            match said["msg_type"]:
                case "stream":
                    shown[content["name"]] += content["text"]
                case "execute_result":
                    shown["result"] = content["data"]["text/plain"]
                case "error":
                    shown["error"] = "\n".join(content["traceback"])
                    shown["name"] = content["ename"]
                case "status" if content["execution_state"] == "idle":
                    return {name: re.sub(r"\x1b\[[0-9;]*m", "", text) for name, text in shown.items()}

    def close(self) -> None:
        """End it."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


@pytest.fixture
def program(job):
    """The mark and the home of the kernel."""
    return Program(job.home, mark=job.mark)


@pytest.fixture
def kernel(program):
    """A fresh kernel."""
    kernel = Kernel(program)
    yield kernel
    kernel.close()


def test_cells_run_functions_and_show_what_workers_say(kernel, program):
    kernel.run(
        "import ddplaunch, os\nbase = 40\n"
        "class Point:\n    def __init__(self, x): self.x = x\n"
        "def f(point):\n"
        "    rank = int(os.environ['RANK'])\n    print('hello of', rank)\n    assert point.x < 5, 'too large'\n"
        "    return Point(base + rank + point.x)\n"
    )
    shown = kernel.run("[(type(one) is Point, one.x) for one in ddplaunch.launch(f, (Point(2),), nproc_per_node=2)]")
    assert shown["result"] == "[(True, 42), (True, 43)]", shown
    assert sorted(shown["stdout"].splitlines()) == ["[0] hello of 0", "[1] hello of 1"]
    assert shown["stderr"] == ""

    shown = kernel.run("ddplaunch.launch(f, (Point(7),), nproc_per_node=2)")
    assert shown["name"] == "AssertionError"
    assert "This is the exception of rank" in shown["error"] and "too large" in shown["error"]
    assert "assert point.x < 5, 'too large'" in shown["error"].partition("exception of rank")[2]
    assert shown["stderr"] == ""

    shown = kernel.run("ddplaunch.launch(os._exit, (3,), nproc_per_node=2)")
    assert "WorkerFailed: rank" in shown["error"] and "failed: exit status 3" in shown["error"]

    # interrupted by the menu of a notebook, which only the kernel hears of
    def interrupt() -> None:
        program.signs("sleeps", 2)
        kernel.manager.interrupt_kernel()

    shown = kernel.run(
        "from tests.programs import functions\nddplaunch.launch(functions.sleeps, nproc_per_node=2)",
        meanwhile=interrupt,
    )
    assert shown["name"] == "KeyboardInterrupt"
    assert kernel.run("import multiprocessing; multiprocessing.active_children()")["result"] == "[]"
    children = "[pid for its in os.listdir('/proc/self/task') for pid in open(f'/proc/self/task/{its}/children').read().split()]"
    left = kernel.run(f"import os; [open(f'/proc/{{pid}}/cmdline').read() for pid in {children}]")["result"]
    assert left.startswith("[") and "ddplaunch" not in left


def test_a_killed_kernel_leaves_nothing(kernel, program):
    def kill() -> None:
        program.signs("sleeps", 2)
        kernel.manager.signal_kernel(signal.SIGKILL)

    kernel.client.execute(
        "import ddplaunch\nfrom tests.programs import functions\nddplaunch.launch(functions.sleeps, nproc_per_node=2)"
    )
    kill()
    kernel.manager.shutdown_kernel(now=True)
    program.nothing_left(PATIENCE)
