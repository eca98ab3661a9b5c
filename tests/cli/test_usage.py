"""The command line as people type it: what it refuses and how it says so, and that nothing starts before it is right."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddplaunch.cli.job import parse
from ddplaunch.system.errors import LaunchError
from tests.cli.typed import said, typed
from tests.conftest import Job, until

# every option string of torch.distributed.run.get_args_parser() in torch 2.14; tests/torch asks the one that is installed
TORCHRUN = """--nnodes --nproc-per-node --nproc_per_node --rdzv-backend --rdzv_backend --rdzv-endpoint --rdzv_endpoint
--rdzv-id --rdzv_id --rdzv-conf --rdzv_conf --max-restarts --max_restarts --monitor-interval --monitor_interval
--start-method --start_method --event-log-handler --event_log_handler --role --log-dir --log_dir -r --redirects -t --tee
--local-ranks-filter --local_ranks_filter --duplicate-stdout-filters --duplicate_stdout_filters
--duplicate-stderr-filters --duplicate_stderr_filters --node-rank --node_rank --master-addr --master_addr --master-port
--master_port --local-addr --local_addr --logs-specs --logs_specs --numa-binding --numa_binding --signals-to-handle
--signals_to_handle --shutdown-timeout --shutdown_timeout --log-line-prefix-template --log_line_prefix_template
--print-completion"""
TORCHRUN_FLAGS = """--standalone -m --module --no-python --no_python --run-path --run_path --virtual-local-rank
--virtual_local_rank"""


@pytest.mark.parametrize("flag", TORCHRUN.split())
def test_torchruns_options_are_options_in_both_spellings(flag: str) -> None:
    assert parse([flag, "VALUE", "train.py"]).program == ("train.py",)
    assert parse([f"{flag}VALUE" if len(flag) == 2 else f"{flag}=VALUE", "train.py"]).program == ("train.py",)


@pytest.mark.parametrize("flag", TORCHRUN_FLAGS.split())
def test_torchruns_flags_are_flags_in_both_spellings(flag: str) -> None:
    assert parse([flag, "train.py"]).program == ("train.py",)


REFUSED = [
    ("--nporc-per-node=2 train.py", "--nporc-per-node is not an option", "did you mean `--nproc-per-node`?"),
    ("--simul train.py", "--simul is not an option", "did you mean `--simulate`?"),
    ("--max-re 3 train.py", "--max-re is not an option", "did you mean `--max-restarts`?"),
    ("-np four x", '-np four: expected a number from 1 to 65536, "gpu", "cpu" or "auto"', "type for example `-np 4`"),
    ("-n 2 --np 2 x", "-n 2 and --np 2 are the same option", "leave one out"),
    ("--nproc-per-node 2 --num_gpus=2 x", "--nproc-per-node 2 and --num-gpus 2 are the same option", "leave one out"),
    ("-j 2x4 x", "-j is not an option", "did you mean `--nnodes 2 --nproc-per-node 4`?"),
    ("-w 4 x", "-w is not an option", "did you mean `--nproc-per-node 4`?"),
    ("-w gpu[1-2] x", "-w is not an option", "did you mean `--hosts gpu[1-2]`?"),
    ("-p main x", "-p is not an option", "did you mean `ddplaunch submit -p main -- ...`?"),
    ("-host a,b x", "-host is not an option", "did you mean `--hosts a,b`?"),
    ("--include localhost:0,1 train.py", "--include localhost:0,1: no hosts are listed", "type `--devices 0,1`"),
    (
        "--num_processes 6 --nnodes 2 --simulate train.py",
        "--num-processes 6 would count the workers of all 2 nodes; here they are counted on each",
        "type `--nproc-per-node 3`",
    ),
    (
        "-n 1 --nnodes 2 --simulate train.py",
        "-n 1 would count the workers of all 2 nodes; here they are counted on each",
        "type `--nproc-per-node N`, with the workers of one node",
    ),
    ("--logs-specs mine x", '--logs-specs mine: expected "default"', "type for example `--logs-specs default`"),
    ("--tee", "--tee needs a value", "type for example `--tee 3`"),
    ("-r", "-r needs a value", "type for example `-r 3`"),
    ("--role --log_dir x train.py", "--role needs a value, but --log_dir follows", "type for example `--role trainer`"),
    ("--nnodes 2:1 train.py", "--nnodes 2:1: MIN exceeds MAX", "type for example `--nnodes 1:2`"),
    ("--heartbeat-timeout 500ms x", "--heartbeat-timeout 500ms: expected at least 1s",
     "type for example `--heartbeat-timeout 30s`"),
    ("--start-method frok x", '--start-method frok: expected "auto", "spawn", "fork" or "forkserver"',
     "did you mean `--start-method fork`?"),
    ("--monitor-interval 0 x", "--monitor-interval 0: expected a number above zero",
     "type for example `--monitor-interval 0.1`"),
    ("python -u train.py --lr 1", "python is no script: ddplaunch starts python itself", "type `ddplaunch train.py --lr 1`"),
    ("torchrun --nproc_per_node 2 train.py --lr 1", "torchrun is a launcher as ddplaunch is: one of them is enough",
     "type `ddplaunch --nproc-per-node 2 train.py --lr 1`"),
    ("accelerate launch --num_processes=2 --mixed_precision fp16 train.py",
     "accelerate is a launcher as ddplaunch is: one of them is enough",
     "type `ddplaunch --nproc-per-node 2 train.py`, which leaves out --mixed_precision fp16"),
    ("\u2014nnodes 2 train.py", "\u2014nnodes contains U+2014 (em dash), as text processors write it",
     "type `ddplaunch --nnodes 2 train.py`"),
    ("-\u2013nnodes=2 train.py", "-\u2013nnodes=2 contains U+2013 (en dash), as text processors write it",
     "type `ddplaunch --nnodes=2 train.py`"),
    ("A=1 train.py", "A=1 is a variable, not a script", "type `ddplaunch --env A=1 train.py`"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a script in it, and an environment that sets no option."""
    (tmp_path / "train.py").write_text("pass\n")
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(("PET_", "DDPLAUNCH_", "TORCH_ELASTIC_")) or name == "PYTHON_EXEC":
            monkeypatch.delenv(name)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("words", "message", "hint"), REFUSED)
def test_a_mistake_is_one_clear_error(words: str, message: str, hint: str) -> None:
    assert said(*words.split()) == (2, f"error: {message}\n\nhint: {hint}\n")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("PET_NNODES", "x", "PET_NNODES=x: expected a number of nodes, or MIN:MAX\n\nhint: type for example `PET_NNODES=2`"),
        ("PET_STANDALONE", "maybe", "PET_STANDALONE=maybe: expected 1 or 0"),
        ("PET_TEE", "9", ("PET_TEE=9: expected 0 (nothing), 1 (stdout), 2 (stderr), 3 (both), or one of these for some "
         "local ranks\n\nhint: type for example 0:3,1:2")),
        ("DDPLAUNCH_PIN", "devcie", ('DDPLAUNCH_PIN=devcie: expected "device", "visible" or "none"\n\n'
         "hint: did you mean `DDPLAUNCH_PIN=device`?")),
    ],
)  # fmt: skip
def test_a_wrong_variable_is_named(name: str, value: str, text: str) -> None:
    assert said("train.py", **{name: value}) == (2, f"error: {text}\n")


QUOTED = [
    (["train.py --lr 0.1"], "'train.py --lr 0.1' is one word to the shell\n\nhint: without the quotes: "
     "type `ddplaunch train.py --lr 0.1`"),
    (["--nnodes 2", "train.py"], "'--nnodes 2' is one word to the shell\n\nhint: without the quotes: type `--nnodes 2`"),
]  # fmt: skip


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("words", "text"), QUOTED)
def test_words_that_are_quoted_together_are_taken_apart(words: list[str], text: str) -> None:
    assert said(*words) == (2, f"error: {text}\n")


NOTED = [
    ("train.py --nproc-per-node 2", {}, "--nproc-per-node after train.py is an option of the script; for ddplaunch type "
     "`ddplaunch plan --nproc-per-node 2 train.py`"),
    ("train.py --a --max_restarts=2 b", {}, "--max-restarts after train.py is an option of the script; for ddplaunch type "
     "`ddplaunch plan --max_restarts=2 train.py --a b`"),
    ("train.py --json", {}, "--json after train.py is an option of the script; for ddplaunch type "
     "`ddplaunch plan --json train.py`"),
    ("train.py --sh 1", {}, "--sh after train.py is an option of the script; for ddplaunch type "
     "`ddplaunch plan --sh train.py 1`"),
    ("train.py --live a --json --lr 1 --nnodes=2 --hosts n1 -v", {}, "--live, --json, --nnodes, --hosts after train.py are "
     "options of the script; for ddplaunch type `ddplaunch plan --live --json --nnodes=2 --hosts n1 train.py a --lr 1 -v`"),
    ("knows.py --live --nnodes 2", {}, "--live after knows.py is an option of the script; for ddplaunch type "
     "`ddplaunch plan --live knows.py --nnodes 2`"),
    ("train.py", {"DDPLAUNCH_NPROC": "2"}, "DDPLAUNCH_NPROC has no effect: ddplaunch has no such variable; did you mean "
     "DDPLAUNCH_NPROC_PER_NODE?"),
    ("train.py", {"DDPLAUNCH_\x1bcccccccc": "2"}, "DDPLAUNCH_\\x1bcccccccc has no effect: ddplaunch has no such variable"),
    ("train.py", {"DDPLAUNCH_FOO": "2"}, "DDPLAUNCH_FOO has no effect: ddplaunch has no such variable"),
    ("train.py", {"DDPLAUNCH_LOG_LEVEL": "2"}, "DDPLAUNCH_LOG_LEVEL has no effect: ddplaunch has no such variable"),
    ("train.py", {"DDPLAUNCH_HOST": "a"}, "DDPLAUNCH_HOST has no effect: ddplaunch has no such variable; did you mean "
     "DDPLAUNCH_HOSTS?"),
    ("train.py", {"DDPLAUNCH_RESTARTS": "2"}, "DDPLAUNCH_RESTARTS has no effect: ddplaunch has no such variable; did you mean "
     "DDPLAUNCH_MAX_RESTARTS?"),
    ("--simulate train.py", {}, "--simulate has one node; for two type `--nnodes 2` as well"),
    ("--simulate train.py", {"PET_NNODES": "1"}, "--simulate has one node; for two type `--nnodes 2` as well"),
    ("--simulate --nnodes 1 train.py", {}, ""),
    ("-q train.py --nnodes 2", {"DDPLAUNCH_NPROC": "2"}, ""),
    ("train.py --backend gloo", {"DDPLAUNCH_TOKEN": "secret"}, ""),  # scripts have a --backend, too
    ("knows.py --nnodes 2", {}, ""),
    ("train.py", {"DDPLAUNCH_RUN_ID": "1", "DDPLAUNCH_DEVICE": "cpu"}, ""),  # inside a worker
    *(
        ("train.py", {"KUBERNETES_SERVICE_HOST": "10.96.0.1", name: "tcp://10.1.2.3:29500"},
         f"{name}=tcp://10.1.2.3:29500 is ignored: Kubernetes sets it in each pod for the Service {service} (unless the pod "
         "has `enableServiceLinks: false`)")
        for name, service in (
            ("MASTER_PORT", "master"), ("PET_MASTER_PORT", "pet-master"), ("DDPLAUNCH_MASTER_PORT", "ddplaunch-master")
        )
    ),
    ("train.py", {"MASTER_PORT": "tcp://172.17.0.2:29500"}, "MASTER_PORT=tcp://172.17.0.2:29500 is ignored: Docker sets it for "
     "a linked container master"),
    ("train.py", {"DDPLAUNCH_PORT": "tcp://10.1.2.3:80", "DDPLAUNCH_SERVICE_HOST": "10.1.2.3", "DDPLAUNCH_SERVICE_PORT": "80",
     "DDPLAUNCH_SERVICE_PORT_HTTP": "80", "DDPLAUNCH_PORT_80_TCP": "tcp://10.1.2.3:80", "DDPLAUNCH_PORT_80_TCP_PROTO": "tcp",
     "DDPLAUNCH_PORT_80_TCP_PORT": "80", "DDPLAUNCH_PORT_80_TCP_ADDR": "10.1.2.3"}, ""),  # nobody meant options by these
    ("train.py", {"DDPLAUNCH_RDZV_PORT": "udp://[fd00::3]:53", "DDPLAUNCH_RDZV_SERVICE_HOST": "fd00::3"}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("words", "env", "note"), NOTED)
def test_what_is_hardly_meant_is_noted(folder: Path, words: str, env: dict[str, str], note: str) -> None:
    (folder / "knows.py").write_text("parser.add_argument('--nnodes')\n")
    result = typed("plan", *words.split(), **env)
    assert (result.exit_code, result.stderr) == (0, f"note: {note}\n" if note else "")


def test_an_option_of_the_script_before_it_is_not_taken_for_one_of_ours() -> None:
    with pytest.raises(LaunchError, match=r"^--log is not an option$"):
        parse(["--log", "x", "train.py"])


@pytest.mark.parametrize(
    ("typed", "option"),
    [
        ("--redirect=3", "redirects"),
        ("--standal", "standalone"),
        ("--nproc=3", "nproc_per_node"),
        ("--no_py", "no_python"),
    ],
)
def test_the_beginning_of_a_flag_of_torchruns_is_enough_as_it_is_there(typed: str, option: str) -> None:
    parsed = parse([typed, "train.py"])
    assert [(one.name, one.text) for one in parsed.given] == [(option, "3" if "=" in typed else "1")]
    assert parsed.program == ("train.py",)


def test_only_the_first_word_can_be_a_verb() -> None:
    assert parse(["--tee", "3", "plan", "x"]).program == ("plan", "x")
    assert parse(["plan"]).program == ("plan",)


# --- the real command


def test_the_command_says_it_on_stderr_and_ends_with_2(job: Job) -> None:
    result = job.run("--nproc-per-node", "four", "train.py")
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(
        'error: --nproc-per-node four: expected a number from 1 to 65536, "gpu", "cpu" or "auto"\n'
    )
    assert not (job.home / "state" / "ddplaunch").exists()


@pytest.mark.parametrize(("words", "status"), [("./train.py", 126), ("nosuch-command", 127)])
def test_commands_that_cannot_be_run_have_the_shells_statuses(job: Job, words: str, status: int) -> None:
    (job.home / "train.py").write_text("pass\n")
    result = job.run("--no-python", words)
    assert (result.status, result.out) == (status, "")
    assert "Traceback" not in result.err


def test_a_wrong_file_above_the_current_folder_is_named_in_full(job: Job) -> None:
    inner = job.home / "inner"
    inner.mkdir()
    (inner / "train.py").write_text("pass\n")
    (job.home / "ddplaunch.toml").write_text("threads = 0\n")
    result = job.run("train.py", cwd=inner)
    assert result.status == 2
    assert result.err.startswith(f"error: threads = 0 in {job.home}/ddplaunch.toml: expected a number from 1\n")


def test_closed_streams_make_no_noise(job: Job) -> None:
    for close in (">&-", "2>&-", ">&- 2>&-", "<&-"):
        shell = f'"$@" {close}'
        argv = ["sh", "-c", shell, "sh", *job.argv("--version")]
        found = subprocess.run(argv, env=job.env, capture_output=True, cwd=job.home, check=False)
        assert (found.returncode, found.stderr) == (0, b""), close


def test_a_reader_that_goes_away_is_no_error(job: Job) -> None:
    read, write = os.pipe()
    os.close(read)
    job.start("--help", stdout=write)
    os.close(write)
    result = job.wait()
    assert (result.status, result.err) == (128 + signal.SIGPIPE, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a Linux device")
def test_a_full_disk_is_said(job: Job) -> None:
    with open("/dev/full", "w") as full:
        result = job.run("--help", stdout=full)
    assert (result.status, result.err) == (1, "error: cannot write to stdout: no space left on device\n")


def test_a_bug_of_ours_shows_where_it_is(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A function of ours that is none stands for any bug."""
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    code = (
        "import sys; from ddplaunch.cli import main as cli; from ddplaunch.launcher.start import dispatch\n"
        "dispatch.show_plan = None\n"
        f"sys.exit(cli.main(['plan', {str(script)!r}]))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 125
    err = capfd.readouterr().err
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.endswith("; please report it with the lines above\n")


def open_for(pipe: Path) -> int | None:
    """Open a named pipe for writing if somebody reads it."""
    try:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        assert error.errno == errno.ENXIO
        return None


def test_ctrl_c_before_anything_starts_ends_quietly(job: Job) -> None:
    """The command waits for a file that is a pipe: as far as it gets without starting."""
    os.mkfifo(job.home / "train.env")
    (job.home / "train.py").write_text("pass\n")
    process = job.start("--env-file", "train.env", "train.py")
    # a reader is there once the command has the file open, and so is in the middle of its work
    writer = until(lambda: open_for(job.home / "train.env"), "the command to open its file of variables")
    process.send_signal(signal.SIGINT)
    result = job.wait()
    os.close(writer)
    assert (result.status, result.err) == (-signal.SIGINT, "")  # which a shell shows as 130


@pytest.mark.parametrize(
    ("words", "noted"),
    [
        ("--restart-on cuda", "--restart-on cuda"),
        ("--max-no-progress 3", "--max-no-progress 3"),
        ("--restart-on cuda --max-restarts 2", ""),
        ("--monitor-interval 5", ""),  # scripts for torchrun have it
    ],
)
def test_an_option_about_restarts_of_a_job_that_has_none_is_noted_at_its_start(
    job: Job, words: str, noted: str
) -> None:
    result = job.run(*words.split(), "--no-python", "true").expect(0)
    why = "has no effect: --max-restarts says how often workers that fail are started again"
    notes = [line for line in result.err.splitlines() if line.startswith("note: ")]
    assert notes == ([f"note: {noted} {why}"] if noted else [])
