"""srun, and the process between it and the command: why a step could not be started reaches the user."""

import os
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from ddplaunch.reach.slurm.srun import StepJob, not_started, start_step
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.process.tree import state_of
from tests.conftest import PATIENCE, until

ROOT = Path(__file__).parents[2]


def step(*argv: str) -> StepJob:
    return StepJob(
        argv=argv,
        env=dict(os.environ),
        signals=frozenset(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
    )


@pytest.mark.parametrize(
    ("mode", "status", "text"),
    [(None, 127, "srun: No such file or directory"), (0o600, 126, "srun: Permission denied")],
    ids=["missing", "no program"],
)
def test_a_program_that_cannot_be_executed_has_the_status_that_a_shell_gives(tmp_path, mode, status, text):
    program = tmp_path / "srun"
    if mode is not None:
        program.touch(mode)
    srun = start_step(step(str(program)))
    assert select.select([srun.fd], [], [], PATIENCE)[0]
    _, never = srun.end()
    assert never is not None
    error = not_started(never)
    assert (error.status, error.message) == (status, f"no step could be started: {text}")


@pytest.mark.parametrize(("script", "status"), [("exit 3", 3 << 8), ("kill -9 $$", signal.SIGKILL)])
def test_one_that_was_started_has_its_own_status(script: str, status: int) -> None:
    srun = start_step(step("sh", "-c", script))
    assert select.select([srun.fd], [], [], PATIENCE)[0]
    assert srun.end() == (status, None)


@pytest.mark.parametrize(("goes_on", "status"), [(signal.SIGCONT, 3 << 8), (signal.SIGKILL, signal.SIGKILL)])
def test_a_signal_that_came_too_late_to_be_passed_on_hides_no_status(
    tmp_path: Path, goes_on: signal.Signals, status: int
) -> None:
    told, goes = tmp_path / "told", tmp_path / "goes"
    os.mkfifo(goes)
    srun = start_step(step("sh", "-c", f"echo $PPID $$ > {told}.new; mv {told}.new {told}; read -r _ < {goes}; exit 3"))
    until(told.exists, "srun")
    parent, own = map(int, told.read_text().split())
    os.kill(parent, signal.SIGSTOP)
    until(lambda: state_of(parent) == "T", "its parent to stop")
    srun.signal(signal.SIGTERM)
    goes.write_text("on\n")
    until(lambda: state_of(own) == "Z", "its end")
    os.kill(parent, goes_on)
    assert select.select([srun.fd], [], [], PATIENCE)[0]
    until(lambda: state_of(parent) in ("", "Z"), "the end of its parent")
    assert srun.end() == (status, None)


def test_a_parent_that_is_stopped_is_killed_and_srun_with_it(tmp_path: Path) -> None:
    told = tmp_path / "told"
    srun = start_step(step("sh", "-c", f"echo $PPID $$ > {told}.new; mv {told}.new {told}; exec sleep 600"))
    until(told.exists, "srun")
    parent, own = map(int, told.read_text().split())
    os.kill(parent, signal.SIGSTOP)
    until(lambda: state_of(parent) == "T", "its parent to stop")
    srun.signal(signal.SIGKILL)
    srun.kill_parent()
    assert select.select([srun.fd], [], [], PATIENCE)[0]
    assert srun.end() == (signal.SIGKILL, None)
    until(lambda: state_of(own) in ("", "Z"), "the end of srun")


def test_a_machine_without_room_is_an_error_that_says_so() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    job = step("true")
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        with pytest.raises(LaunchError, match="no step could be started: cannot create a process: Too many") as failed:
            start_step(job)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert failed.value.status == 126
    assert "ulimit" in (failed.value.hint or "")


@pytest.mark.parametrize("read", [(), (2,), (1, 2)])
def test_srun_writes_what_the_watcher_reads_into_pipes_and_all_else_to_ours(
    capfd: pytest.CaptureFixture[str], read: tuple[int, ...]
) -> None:
    said = {1: "out\n", 2: "err\n"}
    srun = start_step(replace(step("sh", "-c", "echo out; echo err >&2"), read_by_watcher=read))
    assert tuple(srun.output) == read
    for stream, fd in srun.output.items():
        with os.fdopen(fd) as file:
            assert file.read() == said.pop(stream)  # to the end: no other process holds the pipe
    assert select.select([srun.fd], [], [], PATIENCE)[0]
    assert srun.end() == (0, None)
    assert capfd.readouterr() == (said.get(1, ""), said.get(2, ""))


TAKES = "from ddplaunch.reach.slurm import srun; import os; srun.take_stdin(os.environ['DDPLAUNCH_STDIN'])"
READS = {
    "nothing": (f"{TAKES}", "", "a\nb\nc\n"),
    "a line, byte by byte": (f"{TAKES}; os.write(1, os.read(0, 2))", "a\n", "b\nc\n"),
    "all": (f"{TAKES}; os.write(1, os.read(0, 99))", "a\nb\nc\n", ""),
    "srun's": ("import os; os.write(1, os.read(0, 99))", "", "a\nb\nc\n"),
}


@pytest.mark.parametrize("kind", ["file", "pipe"])
@pytest.mark.parametrize(("program", "read", "rest"), READS.values(), ids=READS)
def test_who_is_handed_stdin_takes_what_it_reads_and_srun_takes_nothing(
    tmp_path: Path, kind: str, program: str, read: str, rest: str
) -> None:
    """As in a loop of the shell over the lines of a file."""
    given = tmp_path / "given"
    given.write_text("a\nb\nc\n")
    starts = (
        "import sys; from tests.process.test_srun import step; from msgspec.structs import replace\n"
        "from ddplaunch.reach.slurm.srun import start_step\nimport select\n"
        "srun = start_step(replace(step(sys.executable, '-c', sys.argv[1]), reads_stdin=True))\n"
        "select.select([srun.fd], [], [], 60)\nstatus, never = srun.end()\nsys.exit(status)\n"
    )
    source = f"< {given}" if kind == "file" else f"< <(cat {given})"
    script = f'{{ "$0" -c "$1" "$2" > {tmp_path}/read; cat > {tmp_path}/rest; }} {source}'
    subprocess.run(["bash", "-c", script, sys.executable, starts, program], check=True, timeout=PATIENCE, cwd=ROOT)
    assert ((tmp_path / "read").read_text(), (tmp_path / "rest").read_text()) == (read, rest)


def test_a_task_whose_order_was_damaged_on_its_way_says_so():
    env = {**os.environ, "DDPLAUNCH_SCREEN": ";;;", "DDPLAUNCH_ORDER_0": "eA=="}
    argv = [sys.executable, "-m", "ddplaunch.launcher.start.task"]
    done = subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: the order of this step, in the variables DDPLAUNCH_ORDER_0 and on, is damaged ("
    )
    assert done.stderr.endswith("hint: a prolog of Slurm may have changed them\n")
