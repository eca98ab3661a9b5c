"""Between the fork of the agent and its loop: what it imports comes slowly, as from a file server, or not at all."""

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

import ddplaunch
from ddplaunch.launcher.node import begin
from tests.conftest import until

# an environment in which a module of ours is not read before the test opens the pipe for writing
SLOW = """
import os, sys

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ.get("SLOW_MODULE", "ddplaunch.launcher.node.agent"):
            open(os.path.join(os.environ["DDP_TEST_DIR"], f"imports-{os.getpid()}"), "w").close()
            open(os.environ["SLOW_FILES"]).close()
        return None

sys.meta_path.insert(0, Slow())
"""


@pytest.fixture
def slow_files(tmp_path: Path) -> dict[str, str]:
    """The environment of a command whose agent waits in its imports, and which is installed in a folder of its own."""
    installed = tmp_path / "installed"
    # what another process writes just now, under a name for the time being
    compiling = shutil.ignore_patterns("*.pyc.*")
    shutil.copytree(Path(ddplaunch.__file__).parent, installed / "ddplaunch", ignore=compiling)
    (installed / "sitecustomize.py").write_text(SLOW)
    os.mkfifo(tmp_path / "slow")
    return {"PYTHONPATH": str(installed), "SLOW_FILES": str(tmp_path / "slow")}


def wait_for_imports(job, processes):
    """Wait until so many processes, or more, have come to the slow module."""
    until(lambda: len(list((job.home / "signs").glob("imports-*"))) >= processes, "the imports")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_agent_imports_ends_the_command_at_once(job, slow_files, signum):
    process = job.start("--no-python", "true", env=slow_files)
    wait_for_imports(job, 1)
    process.send_signal(signum)
    ended = job.wait()
    keys = " (Ctrl-C)" if signum == signal.SIGINT else ""
    printed = f"ddplaunch: stopped by {signum.name}{keys} before the workers were started\n"
    assert (ended.status, ended.out, ended.err) == (128 + signum, "", printed)
    job.nothing_left()
    assert not list((job.home / "state").rglob("*-*"))
    assert not os.listdir(job.home / "tmp")


# the last one while node 0 waits for it in its loop already
@pytest.mark.parametrize(
    "module",
    ["ddplaunch.launcher.elsewhere.host_front", "ddplaunch.launcher.node.agent", "ddplaunch.launcher.job.remote_link"],
)
def test_a_signal_while_hosts_import_ends_the_command_at_once(job, slow_files, module):
    env = {**slow_files, "SLOW_MODULE": module}
    process = job.start("--nnodes", 2, "--simulate", "--no-python", "true", env=env)
    wait_for_imports(job, 2 if module == "ddplaunch.launcher.elsewhere.host_front" else 1)
    process.send_signal(signal.SIGINT)
    ended = job.wait()
    assert (ended.status, ended.out) == (130, "")
    stopped = [line for line in ended.err.splitlines() if line.startswith("ddplaunch: stopped by SIGINT (Ctrl-C)")]
    assert stopped == ended.err.splitlines()[-1:]
    job.nothing_left()
    assert not list((job.home / "state").rglob("*-*"))


@pytest.mark.parametrize("module", ["launcher/node/agent.py", "launcher/elsewhere/host_front.py"])
def test_a_host_that_cannot_import_its_modules_is_named(job, slow_files, module):
    file = Path(slow_files["PYTHONPATH"]) / "ddplaunch" / module
    file.unlink()
    file.symlink_to("/proc/self/mem")  # to read it is EIO
    Path(slow_files["PYTHONPATH"], "sitecustomize.py").unlink()
    ended = job.run("--nnodes", 2, "--simulate", "--no-python", "true", env=slow_files)
    assert (ended.status, ended.out) == (126, "")
    said = rf"error: node-[01](, node-1)?: ddplaunch cannot import its modules: {re.escape(str(file))}: input/output error\n"
    assert re.match(said, ended.err), ended.err


def test_an_agent_whose_modules_were_removed_meanwhile_says_so(job, slow_files):
    job.start("--no-python", "true", env=slow_files)
    wait_for_imports(job, 1)
    shutil.rmtree(slow_files["PYTHONPATH"])
    Path(slow_files["SLOW_FILES"]).open("w").close()
    ended = job.wait().expect(126)
    installed = f"{slow_files['PYTHONPATH']}/ddplaunch"
    source = Path(begin.__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(source, 1) if "import agent " in text)
    package = f"{installed}/launcher/node"
    assert ended.err == (
        f"error: ddplaunch cannot import its modules: {package}/begin.py, line {line}: ImportError: cannot import name "
        f"'agent' from 'ddplaunch.launcher.node' ({package}/__init__.py)\n\n"
        "hint: its files are gone, or were changed after the command began, as by an upgrade: run it again; if that fails as "
        "well, install it again\n"
    )
    job.nothing_left()
    assert not os.listdir(job.home / "tmp")


@pytest.mark.parametrize(
    ("module", "named"),
    [
        ("cli/main.py", "cannot import name 'main' from 'ddplaunch.cli'"),
        ("spec/options/resolve.py", "No module named 'ddplaunch.spec.options.resolve'"),
        ("launcher/start/dispatch.py", "cannot import name 'dispatch' from 'ddplaunch.launcher.start'"),
        ("launcher/node/begin.py", "cannot import name 'begin' from 'ddplaunch.launcher.node'"),
        ("launcher/decide/node", "No module named 'ddplaunch.launcher.decide.node'"),
    ],
)
def test_a_module_of_the_command_that_is_missing_is_named(job, slow_files, module, named):
    Path(slow_files["PYTHONPATH"], "sitecustomize.py").unlink()
    missing = Path(slow_files["PYTHONPATH"], "ddplaunch", module)
    shutil.rmtree(missing) if missing.is_dir() else missing.unlink()
    ended = job.run("--no-python", "true", env=slow_files)
    assert (ended.status, ended.out) == (126, "")
    assert ended.err.startswith("error: ddplaunch cannot import its modules: ")
    assert named in ended.err.splitlines()[0]


@pytest.mark.parametrize("module", ["record/file_writer.py", "record/log.py"])
def test_without_a_module_that_writes_logs_it_is_said_why_there_are_none(job, slow_files, module):
    Path(slow_files["PYTHONPATH"], "sitecustomize.py").unlink()
    Path(slow_files["PYTHONPATH"], "ddplaunch", module).unlink()
    ended = job.run("--no-python", "true", env=slow_files)
    assert (ended.status, ended.out) == (0, "")
    assert "ddplaunch: warning: no logs are kept: ddplaunch cannot import its modules: " in ended.err
    assert Path(module).stem in ended.err.splitlines()[0]


@pytest.mark.parametrize(
    ("module", "argv", "status", "said"),
    [
        (
            "msgspec",
            ("--nnodes", 2, "--simulate", "--no-python", "true"),
            126,
            "error: ddplaunch cannot import its modules: ",
        ),
        ("socket", ("ps",), 125, "error: this is a bug in ddplaunch "),
    ],
)
def test_a_module_of_others_that_cannot_be_imported_is_named_and_one_of_python_is_our_bug(
    job, slow_files, module, argv, status, said
):
    folder = Path(slow_files["PYTHONPATH"])
    (folder / "sitecustomize.py").unlink()
    (folder / f"{module}.py").write_text(f"raise ImportError('not here', name={module!r})\n")
    ended = job.run(*argv, env=slow_files)
    assert (ended.status, ended.out) == (status, "")
    assert said in ended.err
    assert "ImportError: not here" in ended.err
