"""What the command imports decides how fast it starts: 0.1 ms for a small module of ours, 20 ms for click, seconds for torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nodes import free_block

pytestmark = pytest.mark.skipif(
    any(map(os.path.exists, ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg"))),
    reason="with an NVIDIA driver each start imports pynvml, and rightly so",
)

PACKAGE = Path(__file__).resolve().parents[2]

# of ours, from the first to the last moment of a job of two workers in which nothing fails; with room for a few more
LIMIT = 118  # modules of ours; each costs some 0.2 ms

# not of ours, public top-level names; whatever is private (C parts of these) or at python's own start does not count
STANDARD = {
    "collections", "contextlib", "copyreg", "ctypes", "enum", "errno", "fcntl", "functools", "gc",
    "itertools", "keyword", "math", "operator", "re", "reprlib", "resource", "select", "selectors", "signal",
    "struct", "termios", "types",
}  # fmt: skip
OF_PYTHON = {"importlib", "runpy", "warnings"}  # by `python -m`

# of ours, and imported only by what needs them
LATER = {
    f"ddplaunch.{name}"
    for name in (
        "agent.answers",
        "agent.clients",
        "control",
        "coordinator.agents",
        "coordinator.join",
        "coordinator.questions",
        "coordinator.remote_link",
        "coordinator.wire",
        "plan.start_method",
        "process.fork_requests",
        "process.fork_server",
        "process.guard",
        "devices.nvidia",
        "devices.nvml",
        "devices.torch_build",
        "cluster.hostlist",
        "net.addresses",
        "net.resolver",
        "remote",
        "report.causes",
        "output.area",
        "output.bars",
        "output.collapse",
        "report.evidence",
        "report.failure",
        "output.filter",
        "report.stack",
        "report.plan_view",
        "runs",
        "slurm",
        "warm",
    )
}

# what only the agent needs is imported there, while the process that writes files makes itself ready: a fork of the command is
# the quicker, and no page of these modules is copied
OF_AGENT = {
    f"ddplaunch.{name}"
    for name in (
        "agent.generations",
        "agent.loop",
        "agent.setup",
        "coordinator",
        "output.display",
        "process.start",
        "report.file_writer",
        "report.reporter",
        "report.run_folder",
        "supervise.job",
    )
}


def imports(tmp_path: Path, *words: str) -> dict[str, int]:
    """The modules that a fresh interpreter imports, in their order, with the microseconds that each took itself."""
    env = {**os.environ, "PYTHONPATH": str(PACKAGE), "XDG_STATE_HOME": str(tmp_path)}
    command = [sys.executable, "-X", "importtime", *words]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    found = re.findall(r"^import time: +(\d+) \| +\d+ \| *(\S+)$", done.stderr, re.MULTILINE)
    return {name: int(took) for took, name in found}


@pytest.fixture
def imported(tmp_path: Path) -> dict[str, int]:
    """What a whole job of two workers imports beyond what any python does: front and agent, from start to end."""
    (tmp_path / "nothing.py").touch()
    always = imports(tmp_path, "-c", "pass")
    whole = imports(tmp_path, "-m", "ddplaunch", "--nproc-per-node", "2", "nothing.py")
    return {name: took for name, took in whole.items() if name not in always}


def test_nothing_heavy_is_imported(imported):
    known = {"ddplaunch"} | STANDARD | OF_PYTHON
    new = sorted(name for name in imported if (top := name.partition(".")[0]) not in known and not top.startswith("_"))
    assert not new, (
        f"new on the start path: {', '.join(f'{name} ({imported[name]} us)' for name in new)}; "
        "import it in the function that needs it, or add it here if every job needs it"
    )


def test_what_few_jobs_need_is_imported_by_those(imported):
    assert not LATER & imported.keys()


def test_the_command_itself_imports_nothing_that_only_its_agent_needs(tmp_path):
    command = imports(tmp_path, "-c", "import ddplaunch.__main__, ddplaunch.launcher.dispatch, ddplaunch.launcher.node")
    assert "ddplaunch.agent.front" in command
    assert not OF_AGENT & command.keys()


def test_the_process_that_writes_files_imports_nothing_heavy(tmp_path):
    """It says nothing of its imports in a job: it has no stderr."""
    always = imports(tmp_path, "-c", "pass")
    writer = imports(tmp_path, "-c", "import ddplaunch.report.file_writer").keys() - always.keys()
    new = {
        top for name in writer if (top := name.partition(".")[0]) not in STANDARD | {"json"} and not top.startswith("_")
    }
    assert new == {"ddplaunch"}


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What the two agents of a job import in their order, that of the coordinator first."""
    folder = tmp_path_factory.mktemp("joined")
    (folder / "nothing.py").touch()
    env = {**os.environ, "PYTHONPATH": str(PACKAGE), "XDG_STATE_HOME": str(folder)}
    port, claim = free_block()
    words = ["-X", "importtime", "-m", "ddplaunch", "-q", "--nnodes", "2", "--master-addr", "localhost"]
    words += ["--master-port", str(port)]
    agents = [
        subprocess.Popen(
            [sys.executable, *words, "--node-rank", str(rank), "nothing.py"],
            env=env,
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [agent.communicate(timeout=60)[1] for agent in agents]
    claim.close()
    assert [agent.returncode for agent in agents] == [0, 0], said
    return [re.findall(r"^import time: +\d+ \| +\d+ \| *(\S+)$", text, re.MULTILINE) for text in said]


def test_an_agent_that_meets_others_imports_nothing_heavy_but_the_decoder_of_messages(joined):
    heavy = {"_hashlib", "asyncio", "dataclasses", "hmac", "inspect", "json", "psutil", "socket", "subprocess"}
    for modules in joined:
        assert "msgspec" in modules
        assert not heavy & {*modules}


def test_an_agent_imports_its_own_side_of_the_channel_alone(joined):
    """By name: how one listens, decides for all and reports on all is of no use to one that joins, nor the other way round."""
    coordinator, other = ({*modules} for modules in joined)
    listens = {
        "control.listener", "coordinator.agents", "coordinator.coordinator", "coordinator.listen", "coordinator.local_link",
        "report.job_reporter", "supervise.job",
    }  # fmt: skip
    looks = {"coordinator.remote_link", "net.resolver", "process.ask"}
    assert {f"ddplaunch.{name}" for name in listens} <= coordinator
    assert not {f"ddplaunch.{name}" for name in listens} & other
    assert {f"ddplaunch.{name}" for name in looks} <= other
    assert not {f"ddplaunch.{name}" for name in looks} & coordinator


def test_the_coordinator_listens_before_it_imports_what_it_says(joined):
    """An agent that is earlier then waits, and does not look again and again, later each time."""
    coordinator, _ = joined
    assert coordinator.index("ddplaunch.net.listen") < coordinator.index("msgspec")


@pytest.mark.parametrize(("place", "limit"), [(0, 150), (1, 133)], ids=["coordinator", "other"])
def test_modules_of_an_agent_among_several_stay_few(joined, place, limit):
    ours = {name for name in joined[place] if name.partition(".")[0] == "ddplaunch"}
    assert len(ours) <= limit, f"{len(ours)} modules: {', '.join(sorted(ours))}"


def test_the_command_that_starts_a_step_of_slurm_imports_no_channel_before_srun(tmp_path):
    """What comes before srun is started is waited for; what watches the step is imported while Slurm starts the agents."""
    before = imports(
        tmp_path, "-c", "import ddplaunch.launcher.dispatch, ddplaunch.slurm.run_step, ddplaunch.cluster.hostlist"
    )
    assert not {"msgspec", "pickle", "socket", "typing", "_hashlib", "subprocess", "ddplaunch.control"} & before.keys()


def test_a_task_of_slurm_imports_no_more_than_the_command(tmp_path):
    task = imports(tmp_path, "-c", "import ddplaunch.launcher.task, ddplaunch.launcher.node")
    assert not {"msgspec", "ddplaunch.cli", "ddplaunch.control", "ddplaunch.coordinator", *OF_AGENT} & task.keys()


def test_modules_of_ours_stay_few(imported):
    ours = {name: took for name, took in imported.items() if name.partition(".")[0] == "ddplaunch"}
    assert len(ours) <= LIMIT, f"{len(ours)} modules at {sum(ours.values())} us in all: {', '.join(sorted(ours))}"


def test_what_happens_in_each_job_imports_nothing_later(imported):
    """Nor what happens in those that run for more than a minute: the files may be gone by then, or be of another version."""
    assert {"ddplaunch.supervise.node.looking", "ddplaunch.supervise.job.hanging"} <= imported.keys()
