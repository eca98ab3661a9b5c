"""What a start imports decides how fast the start is: click and msgspec are paid for, seconds of torch are not."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.nodes import free_block

pytestmark = pytest.mark.skipif(
    any(map(os.path.exists, ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg"))),
    reason="with an NVIDIA driver each start imports pynvml, and rightly so",
)

PACKAGE = Path(__file__).resolve().parents[2]

PAID_FOR = {"ddplaunch", "click", "msgspec", "typing_extensions"}  # every other package has to be asked for
HEAVY = {
    "asyncio",
    "concurrent",
    "ctypes.util",
    "email",
    "http",
    "logging",
    "multiprocessing",
    "pickle",
    "tomllib",
    "urllib",
}
# of ours: one node pays for no other node, a plain job for no verb
OF_OTHER_JOBS = {
    "launcher.elsewhere",
    "launcher.job.agents",
    "launcher.job.remote_link",
    "launcher.workers.forker",
    "plan.cluster.hostlist",
    "reach.channel",
    "reach.slurm",
    "record.window.requests",
    "tools",
}


def imports(tmp_path: Path, *words: str, status: int = 0) -> set[str]:
    """The modules that a fresh interpreter imports, which ends with this status."""
    env = {**os.environ, "PYTHONPATH": str(PACKAGE), "XDG_STATE_HOME": str(tmp_path)}
    command = [sys.executable, "-X", "importtime", *words]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stderr
    return named(done.stderr)


def named(text: str) -> set[str]:
    return set(re.findall(r"^import time: +\d+ \| +\d+ \| *(\S+)$", text, re.MULTILINE))


def heavy(modules: set[str]) -> set[str]:
    """Packages that are not paid for, and heavy modules of the standard library."""
    tops = {name.partition(".")[0] for name in modules}
    foreign = {top for top in tops if top not in sys.stdlib_module_names and not top.startswith("_")}
    return (foreign - PAID_FOR) | (HEAVY & modules)


def of_ours(names: set[str]) -> set[str]:
    return {f"ddplaunch.{name}" for name in names}


@pytest.fixture(scope="module")
def whole_job(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What a whole job of two workers imports beyond what any Python does: front and agent, from start to end."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "nothing.py").touch()
    words = ("-m", "ddplaunch", "--nproc-per-node", "2", "nothing.py")
    return imports(folder, *words) - imports(folder, "-c", "pass")


def test_a_job_without_a_terminal_imports_nothing_heavy(whole_job):
    assert not heavy(whole_job)


def test_a_failure_is_reported_without_rich_and_without_what_reads_proc_for_people(tmp_path):
    """The files of the package may be gone by then, and the report is not to wait for a disk."""
    (tmp_path / "fails.py").write_text("raise ValueError('boom')\n")
    failed = imports(tmp_path, "-m", "ddplaunch", "--nproc-per-node", "2", "fails.py", status=1)
    assert "ddplaunch.launcher.tell.failure" in failed
    assert not {name.partition(".")[0] for name in failed} & {"rich", "psutil", "torch"}


def test_a_job_of_one_node_imports_nothing_of_other_kinds_of_job(whole_job):
    assert not of_ours(OF_OTHER_JOBS) & whole_job


def test_a_job_of_one_node_in_slurm_does_not_import_what_asks_slurm_before_it_asks(tmp_path, monkeypatch):
    (tmp_path / "nothing.py").touch()
    host, counts = os.uname().nodename, ("SLURM_NTASKS", "SLURM_NNODES", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES")
    for name in ("SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SLURMD_NODENAME"):
        monkeypatch.setenv(name, host)
    for name in (*counts, "SLURM_STEP_TASKS_PER_NODE"):
        monkeypatch.setenv(name, "1")
    for name in ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    found = imports(tmp_path, "-m", "ddplaunch", "--nproc-per-node", "1", "nothing.py")
    assert "ddplaunch.plan.cluster.hostlist" in found
    assert not found & {"ddplaunch.reach.slurm.job", "hashlib"}


def test_the_process_that_writes_files_imports_nothing_heavy(tmp_path):
    """It says nothing of its imports in a job: it has no stderr."""
    writer = imports(tmp_path, "-c", "import ddplaunch.record.file_writer") - imports(tmp_path, "-c", "pass")
    assert not heavy(writer)


@pytest.mark.parametrize("kind", ["host", "task", "call"])
def test_an_agent_that_another_ddplaunch_starts_has_no_command_line_to_read(tmp_path, kind):
    """What each imports later is below it, and no layer but the command line's may import click."""
    agent = imports(
        tmp_path,
        "-c",
        f"import ddplaunch.launcher.start.{kind}, ddplaunch.launcher.start.node, ddplaunch.spec.options.resolve",
    )
    assert not {name for name in agent if name.partition(".")[0] == "click" or name.startswith("ddplaunch.cli")}


@pytest.fixture
def short_home() -> Iterator[str]:
    """A home whose runs have their sockets in their own folders, so that no `ddplaunch ps` of another test asks them."""
    with TemporaryDirectory(dir="/tmp") as folder:
        yield folder


def test_agents_that_meet_import_nothing_heavy(tmp_path, short_home):
    (tmp_path / "nothing.py").touch()
    env = {**os.environ, "PYTHONPATH": str(PACKAGE), "XDG_STATE_HOME": short_home}
    port, claim = free_block()
    words = ["-X", "importtime", "-m", "ddplaunch", "-q", "--nnodes", "2", "--master-addr", "localhost"]
    agents = [
        subprocess.Popen(
            [sys.executable, *words, "--master-port", str(port), "--node-rank", str(rank), "nothing.py"],
            env=env,
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [agent.communicate(timeout=60)[1] for agent in agents]
    claim.close()
    assert [agent.returncode for agent in agents] == [0, 0], said
    common = imports(tmp_path, "-c", "pass")
    coordinator, other = (named(text) - common for text in said)
    # a name is looked up in a child, whose answer is pickled
    # psutil knows the interfaces of an address; pickle tries org.python.core, which is Jython's
    assert not heavy(coordinator | other) - {"pickle", "org", "psutil"}
    assert "ddplaunch.launcher.job.agents" in coordinator
    assert not {"ddplaunch.launcher.job.agents", "ddplaunch.launcher.decide.job"} & other, (
        "only the coordinator decides for all"
    )
