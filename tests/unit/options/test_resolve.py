"""Flags, variables and files, merged: which one wins, where it came from, what does not go together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from signal import Signals

import pytest

from ddplaunch.cli.job import parse, resolve
from ddplaunch.spec.job import Fault, JobSpec, Program, ProgramKind, StreamChoice, Streams
from ddplaunch.spec.options.table import OPTIONS, Option
from ddplaunch.system.errors import LaunchError
from tests.unit.builders import typed_spec as spec


def refused(words: str = "", env: Mapping[str, str] | None = None, folder: Path | None = None) -> str:
    """What is said instead, as it stands on stderr."""
    with pytest.raises(LaunchError) as caught:
        spec(words, env, folder)
    assert caught.value.status == 2
    return caught.value.render()


# --- which one wins

PYPROJECT = "[tool.other]\nx = 1\n[tool.ddplaunch]\nthreads = 1\n"
BY_PRECEDENCE = [
    ("--threads 5", {"DDPLAUNCH_THREADS": "4"}, 5, "--threads"),
    ("", {"DDPLAUNCH_THREADS": "4"}, 4, "DDPLAUNCH_THREADS"),
    ("", {}, 2, "ddplaunch.toml"),
]


@pytest.mark.parametrize(("words", "env", "threads", "origin"), BY_PRECEDENCE)
def test_the_nearest_to_the_command_line_wins_and_is_named(
    tmp_path: Path, words: str, env: dict[str, str], threads: int, origin: str
) -> None:
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "ddplaunch.toml").write_text("threads = 2\n")
    job = spec(words, env, tmp_path)
    assert (job.threads, job.origin("threads")) == (threads, origin)


def test_our_variables_win_over_torchruns_and_those_over_files(tmp_path: Path) -> None:
    (tmp_path / "ddplaunch.toml").write_text("nnodes = 3\n")
    assert spec("", {"PET_NNODES": "2"}, tmp_path).nnodes == (2, 2)
    assert spec("", {"PET_NNODES": "2", "DDPLAUNCH_NNODES": "1"}, tmp_path).origin("nnodes") == "DDPLAUNCH_NNODES"


def test_pyproject_counts_only_with_our_table(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "pyproject.toml").write_text("[project]\nname = 'ddplaunch-user'\n")
    job = spec("", {}, inner)
    assert (job.threads, job.origin("threads")) == (1, str(tmp_path / "pyproject.toml"))


def test_a_field_that_nobody_set_has_its_default() -> None:
    assert spec() == JobSpec(program=Program(kind=ProgramKind.SCRIPT, target="train.py"))
    assert spec().origin("nproc_per_node") == "default"


def test_the_last_of_several_flags_counts() -> None:
    assert spec("--threads 2 --threads 3").threads == 3


def test_a_value_that_is_overridden_need_not_be_right() -> None:
    assert spec("--master-port 1", {"PET_MASTER_PORT": "tcp://10.0.0.1:80"}).master_port == 1


def test_an_empty_variable_counts_as_not_set() -> None:
    assert spec("", {"PET_NNODES": " ", "DDPLAUNCH_THREADS": ""}).origins == {}


def test_variables_that_we_set_for_workers_are_not_read_by_a_job_in_a_worker() -> None:
    inside = {"DDPLAUNCH_RUN_ID": "outer", "DDPLAUNCH_BACKEND": "gloo", "DDPLAUNCH_DEVICE": "cuda:0",
              "DDPLAUNCH_INIT_METHOD": "env://", "DDPLAUNCH_LOG_DIR": "/logs"}  # fmt: skip
    assert spec("", inside) == spec()
    assert spec("", {**inside, "PET_LOG_DIR": "here"}).log_dir == "here"


def test_torchs_own_variables_are_read() -> None:
    job = spec("", {"PYTHON_EXEC": "/opt/python", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "45"})
    assert (job.program.python, job.grace_period) == ("/opt/python", 45)


@pytest.mark.parametrize(
    "option", [option for option in OPTIONS if option.may_be_empty], ids=lambda option: option.name
)
def test_an_empty_text_is_as_good_as_none_and_wins_over_variables(option: Option) -> None:
    parsed = parse([option.flag, "", "train.py"])
    assert resolve(parsed, {f"PET_{option.name.upper()}": option.example}, None) == spec()


def test_the_template_of_a_variable_keeps_its_blanks_and_the_flag_wins() -> None:
    env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank}]: "}
    assert spec("", env).log_line_prefix_template == "[rank${rank}]: "
    assert spec("--log-line-prefix-template ${hostname}", env).log_line_prefix_template == "${hostname}"


def test_a_flag_of_another_launcher_means_ours_and_says_so() -> None:
    job = spec("--num_processes 4 --num-machines=1 --gpu_ids 0,1")
    assert (job.nproc_per_node, job.nnodes, job.devices) == (4, (1, 1), ("0", "1"))
    assert job.remarks[0] == "--num-processes 4, as accelerate writes it, is taken as --nproc-per-node"


def test_a_flag_in_a_variable_or_a_file_can_be_off(tmp_path: Path) -> None:
    (tmp_path / "ddplaunch.toml").write_text("virtual-local-rank = true\n")
    assert spec("", {}, tmp_path).virtual_local_rank
    job = spec("", {"PET_VIRTUAL_LOCAL_RANK": "0"}, tmp_path)
    assert not job.virtual_local_rank
    assert "virtual_local_rank" not in job.origins


# --- fields made of several options

PROGRAMS = [
    ("", ProgramKind.SCRIPT),
    ("-m", ProgramKind.MODULE),
    ("--module", ProgramKind.MODULE),
    ("--no-python", ProgramKind.COMMAND),
    ("--run-path", ProgramKind.SCRIPT),
    ("--run-path --no-python", ProgramKind.SCRIPT),
]


@pytest.mark.parametrize(("words", "kind"), PROGRAMS)
def test_the_kind_of_program(words: str, kind: ProgramKind) -> None:
    assert spec(words).program.kind is kind


def test_everything_after_the_script_is_the_scripts() -> None:
    parsed = parse(["--tee", "3", "train.py", "--tee", "1", "--", "-q", "--logs", "x"])
    job = resolve(parsed, {}, None)
    assert job.program.args == ("--tee", "1", "--", "-q", "--logs", "x")
    assert job.tee == StreamChoice(default=Streams.BOTH)


DASHES = {
    "train.py -- --depth=24": ("--depth=24",),
    "-m scripts.base_train -- --depth=24": ("--depth=24",),
    "--no-python train.sh -- -x": ("-x",),
    "train.py --": (),
    "train.py -- --": ("--",),
    "train.py -- -x -- y": ("-x", "--", "y"),
    "train.py x -- y": ("x", "--", "y"),
    "-- train.py -- x": ("--", "x"),
}


@pytest.mark.parametrize(("words", "args"), DASHES.items())
def test_two_dashes_directly_behind_the_program_are_dropped_as_by_torchrun_and_others_kept(words: str, args) -> None:
    assert parse(words.split()).program[1:] == args


@pytest.mark.parametrize("words", DASHES)
def test_what_stands_before_the_program_is_known_whether_its_two_dashes_are_dropped_or_not(words: str) -> None:
    typed = ["--tee", "3", *words.split()]
    assert typed[len(parse(typed).before_program)] in ("train.py", "train.sh", "scripts.base_train")


def test_signals_to_handle_are_the_signals_that_stop() -> None:
    assert spec("--signals-to-handle SIGTERM,SIGUSR1").stop_signals == (Signals.SIGTERM, Signals.SIGUSR1)


def test_shutdown_timeout_is_the_grace_period() -> None:
    job = spec("--shutdown-timeout 5")
    assert (job.grace_period, job.origin("grace_period")) == (5.0, "--shutdown-timeout")
    assert spec("--shutdown-timeout 60 --grace-period 1m").grace_period == 60
    assert spec("--grace-period 5", {"PET_SHUTDOWN_TIMEOUT": "60"}).grace_period == 5


@pytest.mark.parametrize(("words", "verbosity"), [("", 0), ("-q", -1), ("-v", 1)])
def test_verbosity(words: str, verbosity: int) -> None:
    assert spec(words).verbosity == verbosity


@pytest.mark.parametrize(
    ("words", "rank"),
    [
        (["--debug", "train.py", "2"], 0),
        (["--debug", "2", "train.py"], 2),
        (["--debug=2", "train.py"], 2),
        (["--role", "--x", "--debug", "--", "train.py"], 0),
        (["-qr", "3", "--debug", "1", "train.py"], 1),
        (["-r3", "--debug", "train.py"], 0),
        (["train.py", "--debug", "7"], None),
        (["--debug", "--debug", "1", "train.py"], 1),
    ],
)
def test_debug_takes_a_rank_only_if_a_number_follows(words: list[str], rank: int | None) -> None:
    job = resolve(parse(words), {}, None)
    assert (job.debug_rank, job.program.target) == (rank, "train.py")


@pytest.mark.parametrize(
    ("words", "how"),
    [
        (["--simulate", "train.py", "share"], "divide"),
        (["--simulate", "share", "train.py"], "share"),
        (["--simulate=share", "train.py"], "share"),
        (["--simulate", "--nnodes", "3", "train.py"], "divide"),
        (["--simulate", "--", "train.py", "--simulate"], "divide"),
    ],
)
def test_simulate_takes_a_word_only_if_it_is_one_of_its_own(words: list[str], how: str) -> None:
    job = resolve(parse(words), {}, None)
    assert (job.simulate, job.program.target) == (how, "train.py")


def test_faults_are_read() -> None:
    faults = spec("--nnodes 2 --simulate --chaos kill:5@2s,node:1@500ms").chaos
    assert faults == (Fault(kind="kill", target=5, after=2), Fault(kind="node", target=1, after=0.5))


RENDEZVOUS = [
    ("", {}, (600, 30), "default"),
    ("--rdzv-timeout 2m", {}, (120, 30), "--rdzv-timeout"),
    ("--rdzv-conf join_timeout=60,last_call_timeout=5", {}, (60, 5), "--rdzv-conf"),
    ("", {"PET_RDZV_CONF": "timeout=60"}, (60, 30), "PET_RDZV_CONF"),
    ("--rdzv-timeout 2m", {"PET_RDZV_CONF": "timeout=60,last_call_timeout=0"}, (120, 0), "--rdzv-timeout"),
    ("--rdzv-conf timeout=60", {"DDPLAUNCH_RDZV_TIMEOUT": "5"}, (60, 30), "--rdzv-conf"),
    ("--rdzv-conf timeout=60 --rdzv-timeout 1m", {}, (60, 30), "--rdzv-timeout"),
    ("--rdzv-conf timeout=1,join_timeout=2", {}, (1, 30), "--rdzv-conf"),
    ("--rdzv-backend c10d --rdzv-conf timeout=1,join_timeout=2", {}, (2, 30), "--rdzv-conf"),
]


@pytest.mark.parametrize(("words", "env", "seconds", "origin"), RENDEZVOUS)
def test_torchruns_settings_say_how_long_nodes_wait(
    words: str, env: dict[str, str], seconds: tuple[float, float], origin: str
) -> None:
    """torchrun's static rendezvous reads "timeout", the others "join_timeout"."""
    job = spec(words, env)
    assert (job.rdzv_timeout, job.last_call) == seconds
    assert job.origin("rdzv_timeout") == origin


def test_whether_this_is_the_host_stays_in_the_settings() -> None:
    job = spec("--rdzv-conf is_host=False,join_timeout=60")
    assert job.rdzv_conf == {"is_host": "0"}
    assert job.remarks == ()


def test_a_flag_for_one_node_or_simulated_ones_wins_over_hosts_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "ddplaunch.toml").write_text("hosts = ['a', 'b:4']\nremote-python = '/opt/python'\n")
    assert spec("", {}, tmp_path).hosts == "a,b:4"
    for words in ("--simulate", "--standalone", "--hostfile hosts.txt", "--cluster slurm", "--node-rank 1"):
        assert spec(words, {}, tmp_path).hosts is None
    assert spec("--cluster ssh", {}, tmp_path).hosts == "a,b:4"


def test_variables_of_files_come_before_those_of_flags(tmp_path: Path) -> None:
    (tmp_path / "a.env").write_text("A=file\nB=file\n")
    job = spec(f"--env A=flag --env-file {tmp_path}/a.env --env C=flag")
    assert dict(job.env) == {"A": "flag", "B": "file", "C": "flag"}
    assert job.origins_of_secrets == {"B": "--env-file"}


# --- what does not go together

# what is typed, then the error and its hint
CONFLICTS = """
-m --run-path
    error: --module and --run-path do not go together
    hint: SCRIPT is a module's name or a file's path: leave one out
--no-python --python x
    error: --no-python and --python x do not go together
    hint: a command is run without an interpreter: leave one out
--gpus-per-worker 2 --workers-per-gpu 3
    error: --gpus-per-worker 2 and --workers-per-gpu 3 do not go together
    hint: a worker has several GPUs, or several workers share one: leave one out
--virtual-local-rank --pin device
    error: --virtual-local-rank and --pin device do not go together
    hint: --virtual-local-rank shows each worker its own device only: leave --pin out
--virtual-local-rank --pin none
    error: --virtual-local-rank and --pin none do not go together
    hint: --virtual-local-rank shows each worker its own device only: leave --pin out
--cpu-bind cores --numa-binding node
    error: --cpu-bind cores and --numa-binding node do not go together
    hint: both bind the workers to CPUs: leave one out
--standalone --nnodes 1:2
    error: --standalone and --nnodes 1:2 do not go together
    hint: --standalone means one node: leave one out
--standalone --rdzv-endpoint gpu01:29500
    error: --standalone and --rdzv-endpoint gpu01:29500 do not go together
    hint: --standalone means one node, without a rendezvous: leave one out
--forward-signals HUP,WINCH --signals-to-handle HUP,TERM
    error: --forward-signals HUP,WINCH: SIGHUP stops the job
    hint: name the signals that stop it without SIGHUP: --signals-to-handle SIGTERM
--no-control --requeue-on USR1
    error: --no-control and --requeue-on USR1 do not go together
    hint: without a control channel no node knows when all workers have exited: leave one out
--hosts a,b --hostfile hosts.txt
    error: --hosts a,b and --hostfile hosts.txt do not go together
    hint: both say which hosts there are: leave one out
--include a --exclude b
    error: --include a and --exclude b do not go together
    hint: name the hosts to use or those not to use: leave one out
--simulate --hosts a,b
    error: --simulate divide and --hosts a,b do not go together
    hint: all simulated nodes are on this machine: leave one out
--simulate --hostfile hosts.txt
    error: --simulate divide and --hostfile hosts.txt do not go together
    hint: all simulated nodes are on this machine: leave one out
--simulate share --node-rank 1 --nnodes 2
    error: --simulate share and --node-rank 1 do not go together
    hint: all simulated nodes are on this machine: leave one out
--simulate --cluster slurm
    error: --simulate divide and --cluster slurm do not go together
    hint: all simulated nodes are on this machine: leave --cluster out
--hosts a,b --cluster slurm
    error: --hosts a,b and --cluster slurm do not go together
    hint: on hosts that you name, agents are started over ssh: leave one out
--hostfile hosts.txt --node-rank 1
    error: --hostfile hosts.txt and --node-rank 1 do not go together
    hint: hosts that you name have ranks in their order: leave one out
--standalone --hosts a,b
    error: --standalone and --hosts a,b do not go together
    hint: --standalone means one node, this one: leave one out
--chaos kill:5@2s
    error: --chaos kill:5@2s: faults are injected into simulated nodes only
    hint: add --simulate
--simulate --nnodes 3 --chaos kill:5@2s,node:3@1s
    error: --chaos kill:5@2s,node:3@1s: there is no node 3, since the job has 3
    hint: ranks count from 0; --nnodes and --nproc-per-node say how many there are
--simulate --nnodes 1:2 --nproc-per-node 2 --chaos kill:3@2s,hang:4@1s
    error: --chaos kill:3@2s,hang:4@1s: there is no rank 4, since the job has 4
    hint: ranks count from 0; --nnodes and --nproc-per-node say how many there are
--no-control --nnodes 2 --max-restarts 3
    error: --no-control and --max-restarts 3 do not go together
    hint: without a control channel nodes cannot restart together: leave one out
--no-control --hosts a,b --max-restarts 3
    error: --no-control and --max-restarts 3 do not go together
    hint: without a control channel nodes cannot restart together: leave one out
--rdzv-timeout 5 --rdzv-conf is_host=1,join_timeout=60
    error: --rdzv-timeout 5 and join_timeout=60 in --rdzv-conf is_host=1,join_timeout=60 do not go together
    hint: both say how long the nodes wait for each other: leave one out
--rdzv-conf last_call_timeot=5
    error: --rdzv-conf last_call_timeot=5: torchrun knows no last_call_timeot
    hint: did you mean last_call_timeout?
--env RANK=1
    error: --env RANK=1: RANK is set by ddplaunch
    hint: leave RANK out
--env MASTER_ADDR=a
    error: --env MASTER_ADDR=a: MASTER_ADDR is set by ddplaunch
    hint: type `--master-addr a`
--env-file nosuch.env
    error: --env-file nosuch.env: no such file or directory
--env-file /dev/zero
    error: --env-file /dev/zero: it is larger than 1 MiB
"""


def conflicts() -> list[tuple[str, str]]:
    """Return what is typed and what is said, of each."""
    found = re.findall(r"^(\S.*)\n {4}(error: .*)(?:\n {4}(hint: .*))?", CONFLICTS, re.MULTILINE)
    assert len(found) == CONFLICTS.count("    error: ")
    return [(words, "\n\n".join(filter(None, said)) + "\n") for words, *said in found]


@pytest.mark.parametrize(("words", "said"), conflicts())
def test_what_does_not_go_together_is_refused(words: str, said: str) -> None:
    assert refused(words) == said


@pytest.mark.parametrize(
    "words",
    [
        "--virtual-local-rank --pin visible",
        "--cpu-bind none --numa-binding node",
        "--standalone --rdzv-backend c10d --rdzv-endpoint localhost:0 --nnodes 1 --rdzv-id x",
        "--forward-signals HUP",
        "--forward-signals HUP --signals-to-handle TERM",
        "--rdzv-endpoint= --rdzv-conf= --local-ranks-filter=",
        "--simulate --cluster local --nnodes 3 --chaos node:2@1s",
        "--hosts a,b --cluster ssh",
        "--no-control --nnodes 2 --max-restarts 0",
        "--no-control --max-restarts 3",
    ],
)
def test_what_does_no_harm_together_is_taken(words: str) -> None:
    spec(words)


def test_of_two_rivals_the_nearer_to_the_command_line_wins() -> None:
    job = spec("--workers-per-gpu 2", {"DDPLAUNCH_GPUS_PER_WORKER": "4"})
    assert (job.workers_per_gpu, job.gpus_per_worker) == (2, None)
    assert "gpus_per_worker" not in job.origins


# --- accepted for torchrun's sake

REMARKS = [
    ("--monitor-interval 5", "--monitor-interval 5 has no effect: the system tells ddplaunch when a worker ends"),
    ("--start-method fork", "--start-method fork has no effect: every worker is a fresh process"),
    (
        "--event-log-handler console",
        "--event-log-handler console has no effect: events are in events.jsonl of the run folder",
    ),
    (
        "--logs-specs default",
        "--logs-specs default has no effect: logs are written as --log-dir, --redirects and --tee say",
    ),
    (
        "--use_env",
        "--use-env has no effect: LOCAL_RANK is always set, and no --local-rank is added to the script's arguments",
    ),
    (
        "--rdzv-conf timeout=9,read_timeout=5",
        "read_timeout in --rdzv-conf timeout=9,read_timeout=5 has no effect: torch's rendezvous is not used",
    ),
    (
        "--rdzv-conf keep_alive_interval=9",
        "keep_alive_interval in --rdzv-conf keep_alive_interval=9 has no effect: "
        "--heartbeat-timeout says when a node is lost",
    ),
    (
        "--restart-on cuda",
        "--restart-on cuda has no effect: --max-restarts says how often workers that fail are started again",
    ),
    (
        "--max-no-progress 3",
        "--max-no-progress 3 has no effect: --max-restarts says how often workers that fail are started again",
    ),
    ("--max-requeues 3", "--max-requeues 3 has no effect: --requeue-on says after which signals a job is requeued"),
    ("--run-path", "--run-path has no effect: a script is run as a file anyway"),
    ("--rdzv-backend etcd", "--rdzv-backend etcd has no effect: etcd is not used"),
]


@pytest.mark.parametrize(("words", "remark"), REMARKS)
def test_options_without_effect_leave_a_remark(words: str, remark: str) -> None:
    assert spec(words).remarks == (remark,)


@pytest.mark.parametrize(
    "words", ["-t 0:3", "--rdzv-backend c10d", "--standalone", "--rdzv-conf timeout=9,last_call_timeout=5,is_host=1"]
)
def test_options_with_effect_leave_none(words: str) -> None:
    assert spec(words).remarks == ()


def test_what_is_kept_warm_forks_the_workers() -> None:
    kept = spec("--keep-warm 5")
    assert (kept.keep_warm, kept.start_method, kept.typed("start_method", "...")) == (
        5,
        "forkserver",
        "--keep-warm ...",
    )
    assert spec("--keep-warm --preload json").remarks == ()
    assert spec("--keep-warm").keep_warm == 10
    assert spec("--start-method spawn", {"DDPLAUNCH_KEEP_WARM": "5"}).keep_warm is None
    assert spec("--standalone", {"DDPLAUNCH_SPARES": "1", "DDPLAUNCH_NNODES": "2"}).nnodes == (1, 1)
    assert not spec("--nnodes 2:3", {"DDPLAUNCH_STANDALONE": "1", "DDPLAUNCH_NO_CONTROL": "1"}).standalone
    assert "--keep-warm 10 and --start-method auto do not go together" in refused("--keep-warm --start-method auto")


def test_only_a_heartbeat_timeout_that_nobody_has_set_may_be_shortened() -> None:
    assert spec().may_shorten_silence
    assert not spec("--heartbeat-timeout 10s").may_shorten_silence
    assert not spec("", {"DDPLAUNCH_HEARTBEAT_TIMEOUT": "10s"}).may_shorten_silence
