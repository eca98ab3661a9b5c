"""The batch script that `ddplaunch submit` writes, and the variables and files that go with it."""

import shlex
from collections.abc import Sequence
from signal import SIGUSR1

import pytest

from ddplaunch.reach.slurm.scontrol import parse_jobs
from ddplaunch.spec.job import JobSpec, ProgramKind
from ddplaunch.tools.submit import exported, without_outer_job
from ddplaunch.tools.submit.output import expand, is_complete, output_files, shown
from ddplaunch.tools.submit.script import WIDTH, job_name, options_in_script, quote, text
from tests.unit.builders import spec
from tests.unit.slurm.test_submit_args import split


def directives(line: str, job: JobSpec | None = None) -> list[str]:
    return [
        option.argument for option in options_in_script(split([*shlex.split(line), "--", "train.py"]), job or spec())
    ]


def test_a_script_is_what_a_colleague_would_write() -> None:
    request = split(shlex.split("-p gpu --comment 'say \"hi\" # \\' -N 2 --gpus-per-node=4 -Z 1 -v -- train.py"))
    assert text(options_in_script(request, spec()), ["/opt/venv/bin/ddplaunch"], ["train.py", "--name", "a b"], 3) == (
        "#!/bin/bash\n"
        "#SBATCH --job-name=train\n"
        "#SBATCH --partition=gpu\n"
        '#SBATCH --comment="say \\"hi\\" # \\\\"\n'
        "#SBATCH --nodes=2\n"
        "#SBATCH --gpus-per-node=4\n"
        "#SBATCH -Z 1\n"
        "#SBATCH --ntasks-per-node=1\n"
        "#SBATCH --output=%x-%j.out\n"
        "#SBATCH --open-mode=append\n"
        "\n"
        "# ddplaunch starts the workers on all nodes of the job, stops them together, and ends with their status.\n"
        "# exec: it takes the place of this script, so that it gets the signals that Slurm sends.\n"
        "exec /opt/venv/bin/ddplaunch train.py --name 'a b'\n"
    )


DEFAULTS = ["--job-name=train", "--ntasks-per-node=1", "--output=%x-%j.out", "--open-mode=append"]
LACKING = [
    ("", DEFAULTS),
    ("-J x", ["--job-name=x", *DEFAULTS[1:]]),
    ("-n 8", ["--job-name=train", "--ntasks=8", *DEFAULTS[2:]]),
    ("--ntasks-per-node=2", ["--job-name=train", "--ntasks-per-node=2", *DEFAULTS[2:]]),
    ("-o x --open-mode truncate", ["--job-name=train", "--output=x", "--open-mode=truncate", "--ntasks-per-node=1"]),
    ("-a 1-3", ["--job-name=train", "--array=1-3", "--ntasks-per-node=1", "--output=%x-%A_%a.out", "--open-mode=append"]),
    ("-v -Q --test-only", DEFAULTS),
]  # fmt: skip


@pytest.mark.parametrize(("line", "words"), LACKING)
def test_what_is_not_said_has_a_default(line: str, words: list[str]) -> None:
    assert directives(line) == words


def test_the_number_of_nodes_is_that_of_the_job_unless_sbatch_is_told() -> None:
    two = spec(nnodes=(2, 2), origins={"nnodes": "--nnodes"})
    assert "--nodes=2" in directives("", two)
    assert "--nodes=2-4" in directives("", spec(nnodes=(2, 4), origins={"nnodes": "--nnodes"}))
    assert "--nodes=2" not in directives("-N 1-2", two)
    assert not any(word.startswith("--nodes") for word in directives("", spec()))


def test_a_job_that_requeues_itself_is_allowed_to() -> None:
    assert directives("", spec(requeue_on=(SIGUSR1,))) == [*DEFAULTS, "--requeue"]
    assert directives("--requeue", spec(requeue_on=(SIGUSR1,))).count("--requeue") == 1


NAMES = [
    ("a/b/train.py", ProgramKind.SCRIPT, "train"),
    ("job/", ProgramKind.SCRIPT, "job"),
    (".", ProgramKind.SCRIPT, "ddplaunch"),
    ("a b\n.py", ProgramKind.SCRIPT, "a b_"),
    ("pkg.train", ProgramKind.MODULE, "pkg.train"),
    ("/usr/bin/env", ProgramKind.COMMAND, "env"),
]


@pytest.mark.parametrize(("target", "kind", "name"), NAMES)
def test_the_job_is_called_after_what_it_runs(target: str, kind: ProgramKind, name: str) -> None:
    assert job_name(spec(kind, target=target)) == name


def command(job: Sequence[str], program: int) -> list[str]:
    return text([], ["/opt/venv/bin/python", "-m", "ddplaunch"], job, program).splitlines()[4:]


def test_a_long_command_is_broken_between_its_words_and_before_the_script() -> None:
    job = [*("--env", "A=1") * 12, "train.py", "--lr", "0.1", *(f"data-{number}" for number in range(20))]
    lines = command(job, 23)
    assert lines[0] == "exec /opt/venv/bin/python -m ddplaunch \\"
    assert all(line.endswith(" \\") for line in lines[:-1])
    assert max(map(len, lines)) <= WIDTH
    assert not [line for line in lines if line.removesuffix(" \\").endswith("--env")]
    assert [line for line in lines if line.startswith("    train.py --lr 0.1 data-0")]
    assert shlex.split("\n".join(lines).replace("\\\n", ""))[4:] == job


@pytest.mark.parametrize(
    ("word", "quoted"),
    [("a", "a"), ("", "''"), ("a b", "'a b'"), ("$x", "'$x'"), ("ü", "'ü'"), ("it's", "'it'\"'\"'s'"),
     ("a\nb", "$'a\\nb'"), ("a\r\n'\\", "$'a\\r\\n\\'\\\\'"), ("\x071", "$'\\x071'"), ("a\udcff", "'a\udcff'")],
)  # fmt: skip
def test_words_are_quoted_for_bash_on_one_line(word: str, quoted: str) -> None:
    assert quote(word) == quoted


# --- files


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("%x-%j.out", "t-7.out"),
        ("%5j", "00007"),
        ("%3x", "t"),
        ("%%j", "%j"),
        ("%q%j", "%q7"),
        ("%A_%a", "7_%a"),
        ("%N", "%N"),
    ],
)
def test_patterns_are_filled_with_what_is_known(pattern: str, path: str) -> None:
    assert expand(pattern, {"x": "t", "j": "7", "A": "7", "%": "%"}) == path
    assert is_complete("a.out") and not is_complete("%N.out")


FILES = [
    ({"StdOut": "/a/t-7.out", "StdErr": "/a/t-7.out"}, {"/a/t-7.out": 1}),
    ({"StdOut": "/a/o", "StdErr": "/a/e"}, {"/a/o": 1, "/a/e": 2}),
    ({"StdOut": "/dev/null", "StdErr": "/a/e"}, {"/a/e": 2}),
    ({"StdOut": "/a/%N-%4j", "StdErr": "/a/%N-%4j"}, {}),
    ({"StdOut": "/a/%N-%4j", "StdErr": "/a/e%%", "BatchHost": "n1.site"}, {"/a/n1-0007": 1, "/a/e%": 2}),
    ({"StdOut": "/a/%4A_%3a", "ArrayJobId": "5", "ArrayTaskId": "2"}, {"/a/0005_002": 1}),
    ({}, {}),
]


@pytest.mark.parametrize(("job", "files"), FILES)
def test_the_files_of_a_job_are_known_as_soon_as_they_can_be(job: dict[str, str], files: dict[str, int]) -> None:
    (found,) = parse_jobs(
        " ".join(f"{name}={value}" for name, value in {"JobId": 7, "JobState": "RUNNING", **job}.items())
    )
    assert output_files(found) == files


def test_a_path_is_shown_as_short_as_it_can_be() -> None:
    assert [shown(path, "/a/b") for path in ("/a/b/c", "/a/b/c/d", "/a/c", "/a/b")] == ["c", "c/d", "/a/c", "."]


# --- variables


@pytest.mark.parametrize(
    ("export", "names"),
    [(None, {"A": "1", "B": "2"}), ("ALL", {"A": "1", "B": "2"}), ("NONE", {}), ("NIL", {}), ("A", {"A": "1"}),
     ("A,C=3,D", {"A": "1", "C": "3"}), ("ALL,A=9", {"A": "9", "B": "2"})],
)  # fmt: skip
def test_only_exported_variables_reach_the_job(export: str | None, names: dict[str, str]) -> None:
    assert exported({"A": "1", "B": "2"}, export) == names


def test_a_job_does_not_inherit_the_place_of_the_job_in_which_it_was_submitted() -> None:
    login = {"SLURM_CONF": "/c", "SLURM_HINT": "x", "PATH": "/bin"}
    assert without_outer_job(login) == login
    inside = {**login, "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURMD_NODENAME": "n", "SRUN_DEBUG": "3"}
    assert without_outer_job(inside) == {"SLURM_CONF": "/c", "PATH": "/bin"}


@pytest.mark.parametrize("job_id", ["SLURM_JOB_ID", "SLURM_JOBID"])
def test_a_job_does_not_inherit_what_the_job_in_which_it_was_submitted_was_given(job_id):
    given = {
        "SLURM_CPU_BIND": "mask_cpu:0x3",
        "SLURM_MEM_PER_NODE": "4096",
        "SLURM_CPUS_PER_TASK": "8",
        "OMP_PLACES": "cores",
    }
    given |= {
        "SLURM_TRES_PER_TASK": "cpu:8",
        "SLURM_EXPORT_ENV": "NONE",
        "SBATCH_MEM_BIND": "local",
        "_SLURM_SPANK_OPTION_x": "1",
    }
    given |= {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "ZE_AFFINITY_MASK": "0",
        "PMI_RANK": "0",
        "PMIX_RANK": "0",
        "SBATCH_ACCOUNT": "a",
    }
    assert without_outer_job({**given, job_id: "1"}) == {"OMP_PLACES": "cores", "SBATCH_ACCOUNT": "a"}
    assert without_outer_job({"CUDA_VISIBLE_DEVICES": "0,1", "SBATCH_MEM_BIND": "local"}).keys() == {
        "CUDA_VISIBLE_DEVICES",
        "SBATCH_MEM_BIND",
    }


def test_a_job_that_a_worker_submits_is_not_that_of_the_worker():
    worker = {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "node1",
        "TORCHELASTIC_RUN_ID": "r",
        "DDPLAUNCH_RUN_ID": "r",
    }
    assert without_outer_job({**worker, "HOME": "/root"}) == {"HOME": "/root"}
    assert without_outer_job({"RANK": "1", "HOME": "/root"}) == {"RANK": "1", "HOME": "/root"}
