"""`ddplaunch submit` as people type it: the script it shows, and what it refuses before anything is queued."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddplaunch.cli.submit import _OUR_OPTIONS, _REFUSED
from ddplaunch.record import bad_nodes
from ddplaunch.record.bad_nodes import Failure
from ddplaunch.record.folders import bad_nodes_file
from ddplaunch.tools.submit.script import FLAGS, VALUED, options_in_script, text
from tests.cli import typed
from tests.conftest import Job
from tests.unit.builders import spec
from tests.unit.slurm.test_submit_args import split


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a script in it, an environment that sets no option, and no sbatch."""
    (tmp_path / "train.py").write_text("pass\n")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(("PET_", "DDPLAUNCH_", "SBATCH_", "SLURM_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    return tmp_path


@pytest.fixture
def shown(folder: Path):
    """What is shown for these words."""
    return lambda line: typed.shown("submit", *shlex.split(line))


def test_the_script_is_shown_and_nothing_else_happens(shown, folder: Path) -> None:
    script = shown("--print -p gpu --time 4:00:00 -N 2 --gpus-per-node 4 -- --nproc-per-node 4 train.py --lr 0.1")
    assert script.replace(" \\\n    ", " ") == (  # a line is broken where the path of the interpreter is long
        "#!/bin/bash\n"
        "#SBATCH --job-name=train\n"
        "#SBATCH --partition=gpu\n"
        "#SBATCH --time=4:00:00\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --gpus-per-node=4\n"
        "#SBATCH --ntasks-per-node=1\n"
        "#SBATCH --output=%x-%j.out\n"
        "#SBATCH --open-mode=append\n"
        "\n"
        "# ddplaunch starts the workers on all nodes of the job, stops them together, and ends with their status.\n"
        "# exec: it takes the place of this script, so that it gets the signals that Slurm sends.\n"
        f"exec {sys.executable} -P -m ddplaunch --nproc-per-node 4 train.py --lr 0.1\n"
    )
    assert sorted(path.name for path in folder.iterdir()) == ["empty", "train.py"]


def test_the_command_that_was_typed_is_the_one_in_the_script(
    shown, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "ddplaunch").touch()
    monkeypatch.setattr(sys, "argv", ["./ddplaunch", "submit"])
    assert shown("--print -- train.py").endswith(f"\nexec {folder}/ddplaunch train.py\n")


def test_the_number_of_nodes_may_come_from_anywhere(shown, folder: Path) -> None:
    assert "#SBATCH --nodes=3\n" in shown("--print -- --nnodes 3 train.py")
    (folder / "ddplaunch.toml").write_text("nnodes = 2\n")
    assert "#SBATCH --nodes=2\n" in shown("--print -- train.py")
    assert "#SBATCH --nodes=4\n" in shown("--print --nodes 4 -- --nnodes 4 train.py")


def test_spares_are_nodes_that_slurm_is_asked_for(shown) -> None:
    assert "#SBATCH --nodes=3\n" in shown("--print -- --nnodes 2 --spares 1 train.py")
    assert "#SBATCH --no-kill\n" in shown("--print -- --nnodes 2 --spares 1 train.py")
    assert "#SBATCH --no-kill\n" in shown("--print -- --nnodes 2:4 train.py")
    assert "--no-kill" not in shown("--print -- --nnodes 2 train.py")
    assert shown("--print --no-kill=off -- --nnodes 2 --spares 1 train.py").count("--no-kill") == 1
    assert "#SBATCH --nodes=3-5\n" in shown("--print -- --nnodes 2:4 --spares 1 train.py")
    assert "#SBATCH --nodes=3\n" in shown("--print -- --spares 2 train.py")
    assert "#SBATCH --nodes=3\n" in shown("--print -N 3 -- --nnodes 2 --spares 1 train.py")
    assert "#SBATCH --nodes=2\n" in shown("--print -N 2 -- --spares 1 train.py")
    for enough in ("-w gpu[1-4]", "-n 8", "-G 16"):
        assert "--nodes" not in shown(f"--print {enough} -- --spares 1 train.py")


def test_nodes_that_failed_in_slurm_are_excluded_if_that_is_asked(
    shown, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    names = (("gpu01", True), ("laptop", False), ("gpu02", True))
    failures = [Failure(host=host, kind="lost", at=time.time(), in_slurm=in_slurm) for host, in_slurm in names]
    bad_nodes.add(bad_nodes_file(os.environ), failures, time.time())
    assert "#SBATCH --exclude=gpu01,gpu02\n" in shown("--print -- --avoid-bad-nodes train.py")
    assert "#SBATCH --exclude=gpu[07-09],gpu01,gpu02\n" in shown("--print -x gpu[07-09] -- --avoid-bad-nodes train.py")
    assert "exclude" not in shown("--print -- -q train.py")
    scontrol = folder / "empty" / "scontrol"
    scontrol.write_text('#!/bin/sh\nprintf "NodeName=%s State=IDLE\\n" gpu02 gpu03\n')
    scontrol.chmod(0o755)
    assert "#SBATCH --exclude=gpu02\n" in shown("--print -- --avoid-bad-nodes train.py")
    scontrol.write_text("#!/bin/sh\necho NodeName=gpu03 State=IDLE\n")
    assert "exclude" not in shown("--print -- --avoid-bad-nodes train.py")
    scontrol.write_text("#!/bin/sh\nexit 1\n")
    assert "#SBATCH --exclude=gpu01,gpu02\n" in shown("--print -- --avoid-bad-nodes train.py")


def test_a_list_of_failed_nodes_that_cannot_be_used_is_named(folder: Path) -> None:
    state = {"XDG_STATE_HOME": str(folder)}
    path = Path(bad_nodes_file(state))
    path.mkdir(parents=True)
    result = typed.typed("submit", "--print", "--", "--avoid-bad-nodes", "train.py", **state)
    assert result.exit_code == 0
    said = f"ddplaunch: warning: the list of nodes that have failed cannot be used: {path}: not a regular file\n"
    assert result.stderr == said
    assert "exclude" not in result.stdout


def test_a_job_that_requeues_itself_may_be_requeued(shown) -> None:
    assert "#SBATCH --requeue\n" in shown("--print -- --requeue-on USR1 train.py")


def test_what_is_run_is_looked_for_where_it_will_run(shown, folder: Path) -> None:
    (folder / "there" / "logs").mkdir(parents=True)
    (folder / "there" / "other.py").touch()
    script = shown("--print --chdir there -o logs/%j.out -- run other.py")
    assert "#SBATCH --chdir=there\n" in script
    assert script.endswith("-m ddplaunch other.py\n")


def test_a_script_that_is_called_like_a_verb_is_no_verb(shown, folder: Path) -> None:
    (folder / "plan").touch()
    (folder / "run").touch()
    assert shown("--print -- plan x").endswith("-m ddplaunch run plan x\n")
    assert shown("--print -- run x").endswith("-m ddplaunch run run x\n")


REFUSED = [
    ("-- trian.py", "trian.py does not exist", "did you mean `train.py`?"),
    ("-- --nproc-per-node four train.py", '--nproc-per-node four: expected a number from 1 to 65536, "gpu", "cpu" or "auto"',
     "type for example `--nproc-per-node 4`"),
    ("-- --partition gpu train.py", "--partition is not an option of ddplaunch, but one of sbatch",
     "type it before --: ddplaunch submit [SBATCH OPTIONS] -- [OPTIONS] SCRIPT [ARGS]..."),
    ("-- -p gpu train.py", "-p is not an option of ddplaunch, but one of sbatch",
     "type it before --: ddplaunch submit [SBATCH OPTIONS] -- [OPTIONS] SCRIPT [ARGS]..."),
    ("-- --lr 1 train.py", "--lr is not an option",
     "options of the script come after it: ddplaunch [OPTIONS] SCRIPT [ARGS]..."),
    ("--", "there is no SCRIPT to run", "ddplaunch [OPTIONS] SCRIPT [ARGS]...; see ddplaunch --help"),
    ("-- --hostfile h train.py", "--hostfile h: no such file or directory", None),
    ("-- --hostfile . train.py", "--hostfile .: is a directory", None),
    ("-- --token-file t train.py", "--token-file t: no such file or directory", None),
    ("-- --env-file e train.py", "--env-file e: no such file or directory", None),
    ("-- --debug 1 train.py", "--debug 1: a batch job has no terminal",
     "debug it in an allocation of `salloc`, or of `srun --pty bash`"),
    ("--nodes 3 -- --nnodes 2 train.py", "--nodes 3 of sbatch and --nnodes 2 do not go together",
     "leave --nnodes out: the job has all nodes that Slurm gives it"),
    ("-N 1-4 -- --nnodes 2:4 train.py", "--nodes 1-4 of sbatch and --nnodes 2:4 do not go together",
     "leave --nnodes out: the job has all nodes that Slurm gives it"),
    ("--nodes 2 -- --spares 2 train.py", "--nodes 2 of sbatch is too few for --spares 2",
     "type `--nodes 3`: it counts the spares, too"),
    ("-N 2-3 -- --nnodes 2 --spares 1 train.py", "--nodes 2-3 of sbatch is too few for --nnodes 2 with --spares 1",
     "type `--nodes 3`: it counts the spares, too"),
    ("-N 4 -- --nnodes 2 --spares 1 train.py", "--nodes 4 of sbatch and --nnodes 2 with --spares 1 do not go together",
     "leave --nnodes out: the job has all nodes that Slurm gives it"),
    ("--nodes 2 -- --standalone train.py", "--nodes 2 of sbatch and --standalone do not go together",
     "--standalone means one node: leave one out"),
    ("--no-requeue -- --requeue-on USR1 train.py", "--no-requeue of sbatch and --requeue-on do not go together",
     "leave one out: --requeue-on needs a job that may be requeued"),
    ("-o logs/%j.out -- train.py", "output logs/%j.out: the folder logs does not exist, and Slurm does not create it",
     "type `mkdir -p logs`"),
    ("-e %x/%j.err -- train.py", "output %x/%j.err: the folder train does not exist, and Slurm does not create it",
     "type `mkdir -p train`"),
    ("--chdir nowhere -- train.py", "--chdir nowhere: there is no such folder", "looked in FOLDER"),
    ("--chdir /nowhere -- train.py", "--chdir /nowhere: there is no such folder", None),
    ("--follow -a 1-2 -- train.py", "--follow shows the output of one job, not of an array",
     "type --wait, and read the files of its elements with tail -F"),
    ("--follow --print -- train.py", "--follow and --print do not go together",
     "--print runs no job whose output could be shown: leave one out"),
    ("--wait --print -- train.py", "--wait and --print do not go together",
     "--print runs no job to wait for: leave one out"),
    ("--follow --parsable -- train.py", "--follow and --parsable do not go together",
     "both write to stdout: leave one out"),
    ("--wait --test-only -- train.py", "--test-only submits nothing to wait for", "leave one out"),
]  # fmt: skip


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("line", "message", "hint"), REFUSED)
def test_a_mistake_is_one_clear_error_and_nothing_is_queued(line: str, message: str, hint: str | None) -> None:
    assert typed.said("submit", *shlex.split(line)) == (
        2,
        f"error: {message}\n" + (f"\nhint: {hint}\n".replace("FOLDER", os.getcwd()) if hint else ""),
    )


@pytest.mark.usefixtures("folder")
def test_without_slurm_there_is_nothing_to_submit_to() -> None:
    assert typed.said("submit", "--", "train.py") == (
        127,
        "error: sbatch is not on PATH\n\n"
        "hint: submit from a host of a Slurm cluster; --print shows the script anywhere\n",
    )


def test_an_sbatch_without_a_configuration_is_no_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch = folder / "sbatch"
    sbatch.write_text(
        "#!/bin/sh\nexec >&2\necho 'sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host'\n"
        "echo 'sbatch: fatal: Could not establish a configuration source'\nexit 1\n"
    )
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    status, err = typed.said("submit", "--", "train.py")
    assert status == 1
    assert err.startswith("error: no Slurm configured here\n\nhint: submit from a host of a Slurm")


def test_variables_that_the_job_will_not_have_are_not_looked_at(shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "2")
    assert "#SBATCH --nodes=2\n" in shown("--print -- train.py")
    assert "#SBATCH --nodes" not in shown("--print --export=NONE -- train.py")


@pytest.mark.parametrize("words", [["submit", "--help"], ["submit", "--nodes", "2", "-h"]])
def test_help_names_what_is_ours(words: list[str]) -> None:
    text = typed.shown(*words)
    assert text.startswith("Usage: ddplaunch submit [SBATCH OPTIONS] -- [OPTIONS] SCRIPT [ARGS]...\n")
    for option in ("--print", "--wait", "--follow", "--parsable"):
        assert f"{option} " in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_script_that_is_shown_is_one_that_bash_understands(job: Job) -> None:
    (job.home / "train.py").touch()
    shown = job.run("submit", "--print", "--", "--env", "A=$(x)", "train.py", "`", "$'", "a\nb", "\r")
    assert shown.status == 0
    assert subprocess.run(["bash", "-n"], input=shown.out, text=True, capture_output=True, check=False).stderr == ""


# what a command line can hold
WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
VALUES = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=12)
# on a busy machine bash takes any time
NO_CLOCK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@settings(NO_CLOCK, max_examples=60)
@given(st.lists(WORDS, max_size=12), st.integers(0, 60))
def test_words_come_out_of_bash_as_they_went_in(job: list[str], filler: int) -> None:
    words = [*job, *("--filler-word",) * filler]
    script = text([], ["printf", "%s\\0"], words, len(job) // 2)
    shown = subprocess.run(["bash"], input=script.encode(), capture_output=True, check=True)
    assert shown.stderr == b""
    assert shown.stdout.decode().split("\0")[:-1] == (words or [""])


@settings(NO_CLOCK, max_examples=30)
@given(
    st.dictionaries(st.sampled_from(sorted(VALUED - _REFUSED.keys())), VALUES.filter(len), max_size=6),
    st.lists(st.sampled_from(sorted(FLAGS - set(_OUR_OPTIONS) - _REFUSED.keys())), max_size=3),
    st.lists(WORDS, max_size=6),
)
def test_every_script_is_one_that_bash_understands(valued: dict[str, str], flags: list[str], job: list[str]) -> None:
    words = [*(f"--{name}={value}" for name, value in valued.items()), *(f"--{name}" for name in flags)]
    script = text(options_in_script(split([*words, "--", *job]), spec()), ["ddplaunch"], job, len(job))
    done = subprocess.run(["bash", "-n"], input=script.encode(), capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "\r" not in script  # sbatch refuses it
    # a shell reads the directives as sbatch does, which takes each as one word
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert {f"--{name}={value}" for name, value in valued.items()} <= {shlex.split(line[8:])[0] for line in lines}
