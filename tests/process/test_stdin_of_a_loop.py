"""A loop of the shell over the lines of a file has its lines: only a worker that reads takes anything of the command's stdin."""

import subprocess
from pathlib import Path

import pytest

WAYS = {
    "one worker": ("--nproc-per-node", 1),
    "two workers": ("--nproc-per-node", 2),
    "forked workers": ("--nproc-per-node", 2, "--start-method", "forkserver", "--preload", "json"),
    "simulated nodes": ("--nnodes", 2, "--nproc-per-node", 1, "--simulate"),
    "a health check that reads": ("--nproc-per-node", 1, "--health-check", "cat"),
    "a command that is told, and reads": ("--nproc-per-node", 1, "--notify", "cat > /dev/null"),
    "a command that looks for a notice, and reads": ("--nproc-per-node", 1, "--notice-command", "cat; false"),
    "a wrapper": ("--nproc-per-node", 1, "--wrap", "env"),
}


def rounds(job, args: tuple[object, ...], source: str) -> list[str]:
    """Run the command for each line of a file; return the lines that the loop has seen, and then what the workers wrote."""
    (job.home / "lines").write_text("a\nb\nc\n")
    loop = f'while read -r line; do echo "line $line"; "$@" || exit; done {source}'
    job.home.joinpath("state").mkdir(exist_ok=True)
    job.home.joinpath("tmp").mkdir(exist_ok=True)
    done = subprocess.run(
        ["bash", "-c", loop, "bash", *job.argv("-q", *args)],
        env=job.env, cwd=job.home, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_loop_goes_on_where_no_worker_reads(job, way):
    (job.home / "idle.py").write_text("pass\n")
    assert rounds(job, (*way, "idle.py"), "< lines") == ["line a", "line b", "line c"]


@pytest.mark.parametrize("source", ["< lines", "< <(cat lines)"], ids=["file", "pipe"])
def test_rank_0_takes_what_it_reads_and_no_more(job, source):
    (job.home / "reads.py").write_text(
        "import os\nif os.environ['RANK'] == '0':\n    print('read', os.read(0, 2).decode(), end='', flush=True)\n"
    )
    shown = rounds(job, ("--nproc-per-node", 2, "--output", "raw", "reads.py"), source)
    assert shown == ["line a", "read b", "line c", "read "]


def test_a_script_that_the_shell_reads_goes_on_after_the_command(job, tmp_path: Path):
    for name in ("state", "tmp"):
        (job.home / name).mkdir(exist_ok=True)
    command = " ".join(job.argv("-q", "--nproc-per-node", 2, "--no-python", "true"))
    done = subprocess.run(
        ["bash", "-s"], input=f"{command}\necho goes on\n", env=job.env, cwd=job.home,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("goes on\n", 0), done.stderr
