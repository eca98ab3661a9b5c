"""Every command on a page is typed where the page would have it typed, on made-up machines, and does what the page says.

Where a job needs what is not here, such as other hosts, its plan stands for it. What the repository's own examples print is
compared by their own tests.
"""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddplaunch.cli.command import VERBS
from tests.conftest import Job, until
from tests.docs.pages import JOB_SCRIPT, PAGES, ROOT, Command, name_of, story
from tests.docs.pages import commands as commands_of
from tests.docs.places import Place
from tests.docs.shown import missing
from tests.fake_nvml import made_up
from tests.forks import Commands

PLUGIN = ("-p", "ddplaunch.tools.testing.plugin")  # and no other: they take longer to import than ours to run
AT_ONCE = 4  # commands; some of them wait more than they work
STORIES = [ROOT / "docs/tutorial.md"]  # each command finds what the one before it has left
SOURCES = [page for page in [*PAGES, JOB_SCRIPT] if page not in STORIES and any(commands_of(page))]
PORT = "29500"  # of the page about torchrun's users, where somebody has it
NO_JOB = VERBS.keys() - {"run"}


@dataclass
class Typed(Job):
    """One command, or a program of the user's that calls us."""

    program: str = "ddplaunch"

    def argv(self, *args: object) -> list[str]:
        """What to run for the word that stands first."""
        if self.program == "python":
            return [sys.executable, *map(str, args)]
        if self.program == "pytest":
            return [sys.executable, "-m", "pytest", *PLUGIN, "-p", "no:cacheprovider", *map(str, args)]
        return super().argv(*args)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up.library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch, light_torch: None) -> None:
    cuda = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTHONUNBUFFERED")
    for name in (*cuda, "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.mark.parametrize("page", SOURCES, ids=name_of)
def test_the_commands_of_a_page_do_what_it_says(page: Path, library: Path, tmp_path: Path, commands: Commands) -> None:
    typed = list(commands_of(page))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        complaints = pool.map(lambda at: complaint(typed[at], tmp_path / f"{at}", library, commands), range(len(typed)))
    if found := list(filter(None, complaints)):
        pytest.fail("\n\n".join(found), pytrace=False)


@pytest.mark.parametrize("page", STORIES, ids=name_of)
def test_a_story_typed_in_one_folder_happens_as_it_is_told(
    page: Path, library: Path, tmp_path: Path, commands: Commands
) -> None:
    folder = tmp_path / "project"
    for number, typed in enumerate(story(page)):
        if isinstance(typed, str):
            subprocess.run(["sh", "-c", typed], cwd=folder, check=True)
        elif found := complaint(typed, tmp_path / f"{number}", library, commands, folder):
            pytest.fail(found, pytrace=False)


def complaint(command: Command, home: Path, library: Path, typed: Commands, folder: Path | None = None) -> str:
    """What is wrong with a command, typed in a folder of its own unless one is given; "" if nothing is."""
    place = Place(home, command, folder)
    if command.program != "ddplaunch" and not place.own_program:
        return ""
    job = Typed(home / ".local", program=command.program)  # so that the run folders are where the pages say
    with ExitStack() as stack:
        stack.callback(job.kill_all)
        words = stack.enter_context(prepared(place))
        if command.program == "ddplaunch" and (words[0] in NO_JOB or command.is_wrong):
            result = typed.run(job, *words, env=place.variables(library), cwd=place.folder)
        else:
            job.start(*words, env=place.variables(library), cwd=place.folder)
            if asks_to_stop(command):
                stop_when_ready(job)
            result = job.wait()
        job.nothing_left()
    said = f"{command}\nstatus {result.status}\n{result.out}{result.err}"
    if place.is_compared and (lost := missing(command.shown or (), result.out + result.err, home)):
        return f"not printed: {lost}\n{said}"
    if folder is not None and "..." not in (command.shown or ()) and (more := unshown(command, result.out)):
        return f"not shown: {more}\n{said}"
    return "" if is_right(result.status, place) else f"another status: {said}"


def unshown(command: Command, printed: str) -> list[str]:
    """The lines of workers that were printed, but are not on the page, which leaves out none of them."""
    return [line for line in printed.splitlines() if line not in (command.shown or ())]


def is_right(status: int, place: Place) -> bool:
    """Whether a command ended as its page says."""
    command = place.command
    shown = "\n".join(command.shown or ())
    if command.is_wrong:
        return status == 2
    if command.words[:1] == ["doctor"] and "--nodes" not in command.words:
        return status == 1  # torch cannot be imported on a made-up machine
    if not place.is_compared:
        return status == 0
    if command.status is not None:
        return status == command.status
    if asks_to_stop(command):
        return status == 128 + signal.SIGTERM
    failed = re.search(r"^(error: |Traceback|FAILED)", shown, re.MULTILINE) and " finished in " not in shown
    return bool(status) == bool(failed)


def asks_to_stop(command: Command) -> bool:
    """Whether somebody sends SIGTERM to this job while it runs."""
    return any("stopped by SIGTERM after" in line for line in command.shown or ())


def stop_when_ready(job: Job) -> None:
    """Send SIGTERM as soon as every worker has said what it does with it."""

    def ready() -> bool:
        numbers = job.pids() if list(job.home.glob("state/ddplaunch/runs/*/events.jsonl")) else {}
        return bool(numbers) and all(map(takes_sigterm, numbers.values()))

    until(ready, "the workers' handlers")
    assert job.process is not None
    job.process.send_signal(signal.SIGTERM)


def takes_sigterm(pid: int) -> bool:
    """Whether a process catches or ignores SIGTERM."""
    proc = Path(f"/proc/{pid}")
    masks = re.findall(r"^Sig(?:Ign|Cgt):\s*(\w+)$", (proc / "status").read_text(), re.MULTILINE)
    is_itself = b"bootstrap.py" in (proc / "cmdline").read_bytes()  # and no copy of the agent any more
    return is_itself and any(int(mask, 16) >> (signal.SIGTERM - 1) & 1 for mask in masks)


@contextmanager
def prepared(place: Place) -> Iterator[list[str]]:
    """Bring about what a page's mistake is about; give the words to type."""
    words = place.words
    if place.command.is_wrong and PORT in words:
        with taken_port(place.folder) as port:
            yield [port if word == PORT else word for word in words]
        return
    if place.command.is_wrong and place.page == "guides/configuration.md":
        file = place.folder / "ddplaunch.toml"
        file.write_text(file.read_text().replace("nproc-per-node", "nproc-pr-node"))
    yield words


@contextmanager
def taken_port(folder: Path) -> Iterator[str]:
    """A port that another program listens on."""
    (folder / "other.py").write_text("input()\n")
    with socket.create_server(("", 0)) as server:
        other = subprocess.Popen(
            ["python", "other.py"],
            executable=sys.executable,
            cwd=folder,
            stdin=subprocess.PIPE,
            pass_fds=[server.fileno()],
        )
        port = str(server.getsockname()[1])
    with other:
        yield port
        other.communicate(b"\n")
