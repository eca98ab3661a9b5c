"""What the command stands on gives way: closed streams, full disks, lost folders, used-up limits."""

import ctypes
import errno
import json
import os
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import until

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can arrange this")
NOBODY = 54321  # a user without an entry in the user database, and without processes


def closing(*fds: int):
    """Start the command with these descriptors closed."""

    def close() -> None:
        for fd in fds:
            os.close(fd)

    return close


# --- closed streams


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)], ids=str)
def test_closed_streams_keep_no_job_from_running_and_none_of_our_files_takes_their_place(job, program, closed, workers):
    job.run("--nproc-per-node", workers, program("writes"), "descriptors", preexec_fn=closing(*closed)).expect(0)
    assert job.signs("fds", workers) == ["0=/dev/null 1=pipe 2=pipe others=[]"] * workers


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)], ids=str)
def test_with_closed_streams_logs_and_status_are_as_ever(job, program, closed):
    arguments = ("--nproc-per-node", 2, program("writes"), "then_exits", 1_000_000)
    assert job.run(*arguments, preexec_fn=closing(*closed)).status == 7
    assert (job.folder / "rank-0.out").stat().st_size == 1_000_000
    assert json.loads((job.folder / "summary.json").read_text())["status"] == 7


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)], ids=str)
def test_a_mistake_is_told_by_the_status_even_if_nobody_can_be_told(job, closed):
    assert job.run("--nproc-per-node", "none", "x.py", preexec_fn=closing(*closed)).status == 2
    elsewhere = ("--nnodes=2", "--node-rank=0", "--master-addr=192.0.2.1", "--no-python", "true")
    weak = {"DDPLAUNCH_TOKEN": "secret"}  # of which a warning is written first
    assert job.run(*elsewhere, env=weak, preexec_fn=closing(*closed)).status == 2


# --- the run folder


@pytest.fixture
def small_disk(job):
    """A disk of 256 kB for the run folder."""
    disk = job.home / "state"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


@root_only
def test_a_full_disk_is_told_once_and_the_job_goes_on(job, program, small_disk):
    result = job.run("--nproc-per-node", 2, program("writes"), "flood", 1_000_000).expect(0)
    assert len(result.out) == 2 * 1000 * 1004
    assert result.err.count("warning") == 1
    assert "No space left on device" in result.err
    assert "output is shown, but no longer kept" in result.err
    assert all(json.loads(line)["v"] == 1 for line in (job.folder / "events.jsonl").read_text().splitlines())
    for file in job.folder.glob("*.json*"):
        assert file.suffix == ".jsonl" or json.loads(file.read_text())  # whole, or not there


def fill(disk, free: int) -> None:
    """Leave so many bytes free."""
    with open(disk / "filler", "wb", buffering=0) as file:
        with suppress(OSError):
            while True:
                file.write(bytes(4096))
        file.truncate(file.tell() - free)


@root_only
def test_a_full_disk_does_not_hide_how_a_worker_failed(job, program, small_disk):
    fill(small_disk, 0)
    result = job.run("--nproc-per-node", 2, program("behave"), "1=raises").expect(1)
    assert "boom of rank 1" in result.err
    assert "rank 1 failed" in result.err
    assert re.search(r"warning: No space left on device: \S+[^/]: the run folder will not be complete\n", result.err)
    assert result.err.count("No space left") == 1
    assert "rank-1.err" not in result.err


@root_only
def test_a_disk_that_is_full_in_the_middle_of_an_event_leaves_whole_ones_only(job, small_disk):
    fill(small_disk, 8192)  # a page is for the list of removed runs
    assert job.run("--nproc-per-node", 24, "--no-python", "true").status == 0
    text = (job.folder / "events.jsonl").read_text()
    assert 3000 < len(text) <= 4096
    assert text.endswith("\n")
    assert all(json.loads(line)["v"] == 1 for line in text.splitlines())


@pytest.mark.parametrize("place", ["a file", "/proc", "/dev/null"])
def test_where_no_run_folder_can_be_made_the_job_runs_without(job, program, place):
    state = place
    if place == "a file":
        (job.home / "file").touch()
        state = str(job.home / "file")
    result = job.run("--nproc-per-node", 2, program("behave"), "1=raises", env={"XDG_STATE_HOME": state}).expect(1)
    assert result.err.count("warning: no logs are kept: ") == 1
    assert state in result.err
    assert "rank 1 failed: ValueError: boom of rank 1" in result.err
    job.nothing_left()  # nor the folder that the exception was written to


@pytest.mark.parametrize("nodes", [(), ("--nnodes", 2, "--simulate", "--max-restarts", 2)], ids=["one node", "two"])
def test_where_the_folder_that_was_asked_for_cannot_be_made_nothing_starts(job, program, nodes):
    """As under torchrun: who names a folder wants the logs."""
    result = job.run(*nodes, "--nproc-per-node", 2, "--log-dir", "/proc/x/y", program("behave"), "all=done").expect(2)
    assert "could not be started: --log-dir /proc/x/y: No such file or directory: /proc/x\n" in result.err
    assert not job.signs("done", 0)
    assert not result.out


def test_a_run_folder_that_is_removed_meanwhile_is_told_and_the_job_goes_on(job):
    process = job.behave("1=dies_on_sign", options=("--max-restarts", 1))
    until(lambda: len(job.events("worker_started")) == 2, "both starts")
    shutil.rmtree(job.folder)
    (job.home / "signs" / "die").touch()
    result = job.wait()
    assert process.returncode == 3
    assert result.err.count("rank 1 failed") == 2
    assert result.err.count("warning: No such file or directory") == 1


def test_a_state_home_that_is_no_absolute_path_is_ignored_as_the_standard_says(job, program):
    """XDG Base Directory Specification: "All paths set in these environment variables must be absolute"."""
    env = {"XDG_STATE_HOME": "x", "HOME": str(job.home)}
    job.run("--nproc-per-node", 2, program("behave"), "all=done", env=env).expect(0)
    assert not (job.home / "x").exists()
    assert list((job.home / ".local/state/ddplaunch/runs").iterdir())
    relative = job.run("--no-python", "true", env={"XDG_STATE_HOME": "x", "HOME": "y"}).expect(0)
    assert "warning: no logs are kept: HOME=y is no absolute path\n" in relative.err


@root_only
def test_without_any_home_the_job_runs_and_keeps_no_logs(job, program):
    for name in ("tmp", "signs"):
        (job.home / name).mkdir()
    env = {name: value for name, value in job.env.items() if name not in ("HOME", "XDG_STATE_HOME")}
    arguments = job.argv("--nproc-per-node", 2, program("behave"), "all=done")
    as_user = without_rights(*arguments)
    job.process = subprocess.Popen(as_user, env=env, cwd=job.home, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    result = job.wait().expect(0)
    assert "warning: no logs are kept: " in result.err
    assert not (job.home / "~").exists()


def without_rights(*command: str, processes: int | None = None) -> list[str]:
    """The command run by a user whom limits bind, but who may open every file, since tests may lie in root's home."""
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv (util-linux) is not there")
    limit = [] if processes is None else ["prlimit", f"--nproc={processes}:{processes}"]
    capabilities = "+dac_override,+dac_read_search"
    user = [f"--reuid={NOBODY}", "--clear-groups", f"--inh-caps={capabilities}", f"--ambient-caps={capabilities}"]
    return [*limit, "setpriv", *user, *command]


# --- limits


@pytest.mark.parametrize("limit", range(15, 28))
def test_too_few_open_files_stop_the_job_before_it_has_begun(job, program, limit):
    """At one of these limits each of the calls that a start needs is the one that fails."""
    result = job.run(
        "--nproc-per-node", 8, program("behave"), "all=default",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
    )  # fmt: skip
    assert result.status == 126
    # the agent's own start fails at a limit that depends on what the command has inherited
    assert f"too many open files, and no more than {limit} are allowed" in result.err.lower()
    assert "hint: `ulimit -n 4096`" in result.err
    assert "Traceback" not in result.err
    assert "has ended" not in result.err


@pytest.mark.parametrize("limit", [10, 12])
def test_too_few_open_files_for_the_agent_itself_are_named_with_the_limit(job, limit):
    result = job.run(
        "--no-python", "true", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    )
    assert result.status == 126
    assert f"error: ddplaunch cannot start: too many open files, and no more than {limit} are allowed\n" in result.err
    assert "hint: `ulimit -n 4096`" in result.err
    assert "Traceback" not in result.err


@root_only
@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_too_few_processes_stop_the_job_before_it_has_begun(job, limit):
    for name in ("state", "tmp", "signs"):
        (job.home / name).mkdir()
    arguments = job.argv("--nproc-per-node", 4, "--no-python", "sleep", "600")
    command = without_rights(*arguments, processes=limit)
    job.process = subprocess.Popen(command, env=job.env, cwd=job.home, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    result = job.wait().expect(126)
    assert "resource temporarily unavailable" in result.err.lower()
    assert "ulimit -u" in result.err


def test_a_command_that_is_not_there_is_127_and_one_that_cannot_be_executed_126(job):
    result = job.run("--nproc-per-node", 2, "--no-python", "no-such-command")
    assert (result.status, "no-such-command" in result.err) == (127, True)
    plain = job.home / "plain"
    plain.write_text("no program\n")
    result = job.run("--nproc-per-node", 2, "--no-python", plain)
    assert (result.status, str(plain) in result.err) == (126, True)


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"\x00\x01 no program\n", 126), (b"#!/dev/null\n", 126)],
    ids=["not a program", "interpreter cannot be executed"],
)
def test_what_only_the_system_call_finds_out_gives_the_same_status(job, content, status):
    broken = job.home / "broken"
    broken.write_bytes(content)
    broken.chmod(0o755)
    result = job.run("--nproc-per-node", 2, "--no-python", broken).expect(status)
    assert f"could not be started: {broken}: " in result.err
    assert "hint: is it a program for this machine, and executable (`chmod +x`)?" in result.err
    assert job.events("worker_start_failed")[0]["status"] == status
    assert json.loads((job.folder / "summary.json").read_text())["status"] == status


def test_variables_that_are_too_long_for_the_kernel_are_named_as_the_cause(job):
    many = job.home / "many.env"
    many.write_text("".join(f"BIG{number}={'x' * 100_000}\n" for number in range(8)))
    stack = (2 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1])  # of which a quarter may be variables and arguments
    limit = partial(resource.setrlimit, resource.RLIMIT_STACK, stack)
    result = job.run("--env-file", many, "--no-python", "true", preexec_fn=limit).expect(126)
    assert "error: rank 0 could not be started: true: Argument list too long\n" in result.err
    assert "hint: its variables and arguments are too long together" in result.err


def test_256_workers_run_where_256_files_may_be_open_and_have_what_the_hard_limit_allows(job):
    result = job.run(
        "--nproc-per-node", 256, "--no-python", "/bin/sh", "-c", "ulimit -Sn; ulimit -Hn; exit 0",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096)),
    )  # fmt: skip
    assert result.status == 0, result.err
    lines = result.out.splitlines()
    assert sorted(line.split()[1] for line in lines) == ["4096"] * 512
    assert len(json.loads((job.folder / "summary.json").read_text())["workers"]) == 256


def test_ignored_sigpipe_is_not_handed_down(job):
    """Python ignores SIGPIPE; a worker that writes to a closed pipe must end as it would without us."""
    result = job.run("--nproc-per-node", 2, "--no-python", "/bin/sh", "-c", "yes | head -1; kill -PIPE $$; exit 0")
    assert result.status == 128 + signal.SIGPIPE


def ignore_children() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def test_a_caller_that_waits_for_no_child_has_the_same_job(job, program):
    result = job.run("--nproc-per-node", 2, program("behave"), "all=done", preexec_fn=ignore_children).expect(0)
    assert "error" not in result.err


def test_a_program_that_waits_for_no_child_may_launch_functions(job):
    script = job.home / "launches.py"
    script.write_text(
        "import os, ddplaunch\n"
        "def rank(): return os.environ['RANK']\n"
        "if __name__ == '__main__': print(ddplaunch.launch(rank, nproc_per_node=2))\n"
    )
    done = subprocess.run(
        [sys.executable, script],
        cwd=job.home,
        env=job.env,
        preexec_fn=ignore_children,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b"['0', '1']\n"), done.stderr


def test_a_current_folder_that_was_removed_is_no_obstacle(job, program):
    gone = job.home / "gone"
    gone.mkdir()
    result = job.run("--nproc-per-node", 2, program("behave"), "1=exit3", cwd=gone, preexec_fn=gone.rmdir).expect(3)
    assert "rank 1 failed: exit status 3" in result.err


@root_only
def test_the_command_may_be_the_first_process_of_a_container(job, program):
    """Pid 1 has no default actions: a signal that it does not handle is lost."""
    for name in ("state", "tmp", "signs"):
        (job.home / name).mkdir()
    outside = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    command = [*outside, *job.argv("--nproc-per-node", 2, program("saves"))]
    job.process = subprocess.Popen(command, env=job.env, cwd=job.home, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    job.signs("ready", 2)
    first = int(Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()[0])
    os.kill(first, signal.SIGTERM)
    job.wait().expect(128 + signal.SIGTERM)
    job.signs("saved", 2)


# --- text of others


@pytest.mark.parametrize("where", [(), ("--simulate", "--nnodes=2")], ids=["one", "simulated"])
@pytest.mark.parametrize("colour", ["", "1"])
def test_no_terminal_obeys_what_a_worker_has_us_say(job, where, colour):
    script = job.home / "a\x1b]52;c;cm0K\x07\nerror: b.py"
    script.write_text("raise type('\\x1bcT\\nhint: c', (Exception,), {})('\\x9b2J\\u202e\\r\\ud83d \\x1b[8mhidden')")
    job.start(*where, "--output=none", script, env={"FORCE_COLOR": colour})
    shown = job.wait().err
    ours = re.sub(r"\x1b\[(0|1|2|36|1;31)m", "", shown)  # our colours; the worker's own \x1b[8m would stay
    assert ours.replace("\n", "").isprintable(), shown
    assert ("\x1b" in shown) is bool(colour)
    assert {line.partition(":")[0] for line in ours.splitlines() if line[:1].strip()} == {"ddplaunch", "error"}
    missing = job.run("a\x1bc\nhint: b.py")
    assert missing.err.startswith("error: a\\x1bc\n  hint: b.py does not exist\n")


# --- a kernel or a sandbox that lacks something


def failing(call: int, error: int, first: int | None = None):
    """Start the command where this system call fails, with `first` as its first argument or any (seccomp(2), linux/filter.h)."""
    load, if_equal, give = 0x20, 0x15, 0x06
    allow, fail = 0x7FFF0000, 0x00050000 | error
    program = [(load, 0, 0, 0), (if_equal, 0, 1, call), (give, 0, 0, fail), (give, 0, 0, allow)]
    if first is not None:
        program[1:2] = [(if_equal, 0, 3, call), (load, 0, 0, 16), (if_equal, 0, 1, first)]
    return lambda: _filter_calls(program)


def _filter_calls(program: list[tuple[int, int, int, int]]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    filter_ = struct.pack("HP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, filter_, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def test_a_kernel_without_process_descriptors_is_named(job, program):
    result = job.run(program("writes"), "both", preexec_fn=failing(434, errno.ENOSYS))
    assert (result.status, result.out) == (126, "")
    assert "pidfd_open" in result.err
    assert f"hint: it takes Linux 5.3 or newer (this is {os.uname().release})" in result.err
    assert "seccomp" in result.err


def test_a_kernel_without_ipv6_has_no_such_address(job, program):
    call = {"x86_64": 41, "aarch64": 198}[os.uname().machine]
    result = job.run(
        *("--nnodes", 2, "--node-rank", 0, "--master-addr", "::1", program("behave"), "all=default"),
        preexec_fn=failing(call, errno.EAFNOSUPPORT, socket.AF_INET6),
    )
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("error: ::1 is not an address of this node, which is to be node 0 and waits there")


def without_network() -> None:
    """Move this process into a network namespace of its own, in which no interface is up."""
    assert ctypes.CDLL(None).unshare(0x40000000) == 0  # CLONE_NEWNET; os.unshare is there from Python 3.12 on


@root_only
@pytest.mark.parametrize("where", [("--nproc-per-node=2",), ("--nnodes=2", "--simulate")], ids=["one", "simulated"])
def test_a_loopback_interface_that_is_down_is_named(job, program, where):
    result = job.run(*where, program("writes"), "both", preexec_fn=without_network)
    assert (result.status, result.out) == (2 if len(where) == 1 else 121, "")
    assert "the workers cannot reach each other at 127.0.0.1: network is unreachable" in result.err
    assert "ip link set lo up" in result.err
    assert job.run(program("writes"), "both", preexec_fn=without_network).status == 0  # one worker needs none


# --- what a program leaves where it may write

NESTS = """
import os, sys
sys.path.insert(0, sys.argv[1])
import signs
at = os.open(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"]), os.O_RDONLY)
for _ in range(3000):
    os.mkdir("d", dir_fd=at)
    at, before = os.open("d", os.O_RDONLY, dir_fd=at), at
    os.close(before)
signs.put("folder", os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"]))
"""


def test_thousands_of_folders_in_each_other_beside_the_file_of_an_exception_cost_the_job_nothing(job, program):
    script = job.home / "nests.py"
    script.write_text(NESTS)
    result = job.run(script, program("signs").parent)
    assert (result.status, result.err.count("Traceback")) == (0, 0), result.err[:2000]
    assert not Path(job.sign("folder")).exists()
