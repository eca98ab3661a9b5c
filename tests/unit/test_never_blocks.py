"""What runs in a loop calls nothing that may wait for a disk, a driver, a name server or another program."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "ddplaunch"
LOOPS = (
    "launcher/decide", "launcher/elsewhere", "launcher/job", "launcher/look/debuggers.py", "launcher/look/inspection.py",
    "launcher/node", "launcher/output", "launcher/tell", "launcher/workers/forker.py", "reach", "record", "spec/error_file.py",
)  # fmt: skip

# calls that may take as long as something outside wants; `ask` waits itself, `Loop.ask` does not
SLOW = {
    "access", "ask", "exists", "fsync", "getaddrinfo", "glob", "isdir", "isfile", "listdir", "look_up", "lstat", "makedirs",
    "mkdir", "open", "posix_spawn", "realpath", "remove", "rename", "replace", "rmdir", "rmtree", "run", "scandir", "scontrol",
    "sleep", "stat", "statvfs", "system", "unlink", "which", "why_ending",
}  # fmt: skip
OF_OURS = SLOW - {"remove", "replace", "run", "stat"}  # are something else there
MODULES = {"os", "path", "psutil", "shutil", "socket", "subprocess", "tempfile", "time"}

# where they are not in a loop, or wait for nothing outside
HARMLESS = {
    "launcher/node/child.py": "the front, while it kills",
    "launcher/node/starter.py": "/dev/null",
    "launcher/node/notices.py": "what a child does that is asked",
    "record/about.py": "what a child does that is asked",
    "launcher/node/services.py": "what a child does that is asked, and /dev/null",
    "launcher/job/join.py": "before the job begins; the front can kill the agent",
    "launcher/elsewhere/slurm/presence.py": "the start of a command",
    "reach/startup.py": "what a child does that is asked",
    "reach/protocol.py": "/dev/null",
    "spec/error_file.py": "files in memory",
    "record/bad_nodes.py": "what a child does that is asked, and the start of a command",
    "record/file_writer.py": "the process that writes files",
    "record/folders.py": "the process that writes files",
    "record/old_runs.py": "the process that writes files, and commands that look for runs",
    "record/log.py": "the process that writes files, and ddplaunch logs",
    "record/log_reader.py": "commands that read what is left of runs",
    "record/run_socket.py": "the process that writes files, and commands that look for runs",
    "reach/slurm/job.py": "what a child does that is asked",
    "reach/slurm/scontrol.py": "what a child does that is asked, and the start of a command",
    "reach/slurm/srun.py": "/dev/null",
}


def slow_calls(path: Path) -> Iterator[str]:
    for found in ast.walk(ast.parse(path.read_text())):
        match found:
            case ast.Call(func=ast.Name(id=name)) if name in OF_OURS:
                yield f"{found.lineno}: {name}"
            case ast.Call(func=ast.Attribute(attr=name, value=ast.Name(id=of) | ast.Attribute(attr=of))) if (
                of in MODULES
            ):
                if name in SLOW or of in ("psutil", "subprocess"):
                    yield f"{found.lineno}: {of}.{name}"


def modules() -> list[str]:
    """The files that run in a loop; of a folder or file that was moved, nothing would be tested."""
    assert [loop for loop in LOOPS if not (PACKAGE / loop).exists()] == []
    paths = [
        path for loop in LOOPS for path in (PACKAGE / loop, *(PACKAGE / loop).rglob("*.py")) if path.suffix == ".py"
    ]
    return sorted(str(path.relative_to(PACKAGE)) for path in paths)


def test_each_file_that_may_wait_is_one_of_those_in_a_loop() -> None:
    assert HARMLESS.keys() - {*modules()} == set()


@pytest.mark.parametrize("name", modules())
def test_a_loop_waits_for_nothing_outside(name: str) -> None:
    found = list(slow_calls(PACKAGE / name))
    assert bool(found) == (name in HARMLESS), found
