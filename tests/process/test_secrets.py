"""A job has its secrets whole, and no file of its folder, no message and no other command shows them."""

from __future__ import annotations

import json

from tests.conftest import Job

SECRETS = {"MY_TOKEN": "hush-known-4", "PET_RDZV_CONF": "password=hush-7", "DB_URL": "postgres://me:hush-8@host/db"}
ARGV = (
    "--hf-token", "hush-1", "--api-key=hush-2", "wandb.api_key=hush-3", "--max-tokens", "512", "--name", "hush-known-4",
)  # fmt: skip
SHOWN = ["--hf-token", "...", "--api-key=...", "wandb.api_key=...", "--max-tokens", "512", "--name", "..."]


def test_a_job_has_its_secrets_and_shows_them_nowhere(job: Job, program) -> None:
    tell = f"cat >> {job.home}/told"
    options = ("--nproc-per-node", 2, "--env", "DB_PASSWORD=hush-5", "--notify", f"{tell} # https://me:hush-9@host")
    job.start(*options, program("knows_secrets"), *ARGV, env=SECRETS)
    job.signs("ready", 2)
    other = Job(job.home, job.mark)
    for verb in (("ps",), ("ps", "--json"), ("stacks",)):
        assert "hush" not in other.run(*verb, env=SECRETS).out
    (job.home / "signs" / "go").touch()
    result = job.wait().expect(1)
    told = [line for line in result.err.splitlines() if not line.startswith("[")]  # what is not the workers' own
    assert "hush" not in "\n".join(told)
    assert "no login with password='...' at https://me:...@host for ..." in result.err

    assert job.folder is not None
    kept = {path.name: path.read_text() for path in job.folder.iterdir() if path.suffix in (".json", ".jsonl")}
    assert {"plan.json", "events.jsonl", "summary.json"} <= kept.keys()
    assert [name for name, text in kept.items() if "hush" in text] == []
    worker = json.loads(kept["plan.json"])["workers"][0]
    assert worker["argv"][-len(SHOWN) :] == SHOWN
    assert worker["variables"]["DB_PASSWORD"] == "..."
    assert "hush" not in (job.home / "told").read_text()

    assert "values hidden" in other.run("report", job.folder, env=SECRETS).err
    assert "hush" not in (job.folder / "report.html").read_text()


def test_a_name_that_was_asked_for_stays_even_if_it_looks_random(job: Job, program) -> None:
    name = "kQ7wZp2Rt9LmXv4BnYs8Hd3JfGc6Ta1U"
    job.run("--nproc-per-node", 2, "--run-id", name, program("behave"), "all=done").expect(0)
    assert job.folder is not None
    assert job.folder.name == name
    (begun,) = job.events("job_started")
    assert begun["run_id"] == json.loads((job.folder / "plan.json").read_text())["run_id"] == name


def test_the_plan_shows_no_secret_and_its_commands_are_whole(job: Job, program) -> None:
    line = ("--env", "DB_PASSWORD=hush-5", program("knows_secrets"), *ARGV)
    for form in (("-v",), ("--json",)):
        shown = job.run("plan", *form, *line, env=SECRETS).expect(0).out
        assert "hush" not in shown
        assert "DB_PASSWORD" in shown
    commands = job.run("plan", "--sh", *line, env=SECRETS).expect(0).out
    assert "# export first, with their values, which are not shown: DB_PASSWORD" in commands
    assert "# the arguments of the script seem to hold a secret" in commands
    assert "--hf-token hush-1 --api-key=hush-2" in commands
    assert "hush-5" not in commands


def test_an_error_names_what_was_typed_without_its_secret(job: Job) -> None:
    for line in (
        ("--rdzv-conf", "password=hush,x", "t.py"),
        ("HF_TOKEN=hush", "t.py"),
        ("--gpu", "2", "t.py", "--hf-token", "hush"),
    ):
        result = job.run(*line)
        assert result.status == 2
        assert "hush" not in result.err


def test_a_batch_script_is_whole_and_a_warning_says_so(job: Job, program) -> None:
    script = program("knows_secrets")
    result = job.run("submit", "--print", "--", script, "--hf-token", "hush-1").expect(0)
    assert "--hf-token hush-1" in result.out
    assert "the script holds a likely secret" in result.err
    assert "hush" not in result.err
    assert job.run("submit", "--print", "--", script, "--max-tokens", "5").expect(0).err == ""


def test_the_doctor_shows_no_secret_of_a_variable(job: Job) -> None:
    shown = job.run("doctor", env=SECRETS).out
    assert "PET_RDZV_CONF=password=..." in shown
    assert "hush" not in shown
