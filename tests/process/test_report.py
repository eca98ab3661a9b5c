"""`ddplaunch report`: the page of a job that failed and started again, and one clear error for all else."""

import gzip
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from ddplaunch.cli import main
from tests.conftest import PATIENCE


@pytest.fixture
def report(job, monkeypatch, capsys):
    """Call `ddplaunch report` as in a shell of the user of this job; without a name it may be about a run of another test."""
    monkeypatch.setenv("XDG_STATE_HOME", job.env["XDG_STATE_HOME"])

    def call(*words: str) -> tuple[int, str, str]:
        status = main.main(("report", *words))
        return status, *capsys.readouterr()

    return call


def test_the_page_of_a_job_with_a_restart_is_in_its_folder(job, program, report):
    job.run("--nproc-per-node", 2, "--max-restarts", 1, program("behave"), "1=raises", "0=polite").expect(1)
    status, out, err = report(job.folder.name)
    assert (status, out, err) == (0, f"{job.folder}/report.html\n", "")
    text = (job.folder / "report.html").read_text()
    for words in ("1 restart", "Rank 1 on ", "Traceback (most recent call last)", "ended with 0", "behave.py"):
        assert words in text


def test_the_trace_is_written_in_place_of_the_page(job, program, report, tmp_path):
    job.run("--nproc-per-node", 2, program("behave"), "all=done").expect(0)
    file = tmp_path / "trace.json"
    assert report(job.folder.name, "--trace", str(file)) == (0, f"{file}\n", "")
    assert report(job.folder.name, "--trace", f"{file}.gz")[0] == 0
    assert gzip.decompress(Path(f"{file}.gz").read_bytes()) == file.read_bytes()
    names = {entry["args"].get("name") for entry in json.loads(file.read_text())["traceEvents"]}
    assert {"rank 0", "rank 1", "generations"} <= names
    assert not (job.folder / "report.html").exists()
    assert report("--trace", str(file), "--open")[2].startswith("error: --trace FILE writes a trace and no page\n")


def test_a_job_that_runs_has_a_page_too(job, report, tmp_path):
    job.behave()
    assert report(job.folder.name, "--out", str(tmp_path / "page.html"))[0] == 0
    assert "The run goes on" in (tmp_path / "page.html").read_text()
    job.process.send_signal(signal.SIGINT)
    job.wait().expect(130)


def test_what_cannot_be_shown_or_written_is_one_error(job, program, report, tmp_path):
    job.run(program("behave"), "all=done").expect(0)
    assert "error: there is no run no-such-run here" in report("no-such-run")[2]
    without = report(f"{tmp_path}/.")[2]
    assert "holds no events of a run\n\nhint: `ddplaunch ps --all` lists your runs\n" in without
    status, _, err = report(job.folder.name, "--out", "/no/such/folder/page.html")
    assert status == 2
    assert err == (
        "error: cannot write /no/such/folder/page.html: no such file or directory\n\nhint: name another file\n"
    )


@pytest.mark.parametrize("option", ["--out", "--trace"])
def test_a_page_that_cannot_be_written_to_its_end_leaves_the_old_one_whole_and_nothing_else(
    job, program, tmp_path, option
):
    job.run("--nproc-per-node", 2, program("behave"), "all=done").expect(0)
    folder = tmp_path / "pages"
    folder.mkdir()
    (folder / "page").write_text("old")
    words = job.argv("report", job.folder.name, option, folder / "page")
    on_full_disk = ["prlimit", "--fsize=1000", *words]
    env = {**job.env, "PYTHONDONTWRITEBYTECODE": "1"}  # else Python keeps halves of what it has compiled
    done = subprocess.run(on_full_disk, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: cannot write {folder}/page: file too large\n")
    assert (os.listdir(folder), (folder / "page").read_text()) == (["page"], "old")
    subprocess.run(words, env=job.env, stdout=subprocess.DEVNULL, timeout=PATIENCE, check=True)
    assert len((folder / "page").read_text()) > 1000
    shown = subprocess.run(
        [*words[:-1], "/dev/stdout"], env=job.env, stdout=subprocess.PIPE, timeout=PATIENCE, check=True
    )
    assert len(shown.stdout) > 1000


def test_a_link_in_the_place_of_the_page_is_not_followed_nor_is_a_pipe_waited_for(job, program, report, tmp_path):
    job.run(program("behave"), "all=done").expect(0)
    os.mkfifo(job.folder / "report.html")
    assert "report.html: not a regular file\n" in report(job.folder.name)[2]
    (job.folder / "report.html").unlink()
    (job.folder / "report.html").symlink_to(tmp_path / "other")
    assert report(job.folder.name)[0] == 2
    assert not (tmp_path / "other").exists()


def test_a_browser_is_given_the_file(job, program, report, monkeypatch, tmp_path):
    job.run(program("behave"), "all=done").expect(0)
    shown = tmp_path / "shown"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {shown}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    assert report(job.folder.name, "--open")[0] == 0
    assert shown.read_text() == f"file://{job.folder}/report.html\n"


def test_a_job_with_a_restart_says_where_its_time_went(job, report, tmp_path):
    script = tmp_path / "steps.py"
    script.write_text(
        "import os, time, ddplaunch\n"
        "again = os.environ['TORCHELASTIC_RESTART_COUNT'] == '1'\n"
        "for step in range(5 if again else 0, 20):\n"
        "    ddplaunch.progress(step, 20); time.sleep(0.02)  # the work of a step\n"
        "    if step == 10 and not again: raise SystemExit(3)\n"
    )
    result = job.run("--nproc-per-node", 2, "--max-restarts", 1, script).expect(0)
    assert re.search(r"after 1 restart, effective \d+%: start .*, restarts .*, steps done again .*", result.err)
    spent = json.loads((job.folder / "summary.json").read_text())["time_spent"]
    assert spent["again"] > 0
    parts = [spent[name] for name in ("start", "steps", "again", "restarts", "end")]
    assert sum(parts) == pytest.approx(spent["total"], abs=0.01)
    report(job.folder.name)
    page = (job.folder / "report.html").read_text()
    assert "steps done again" in page
    effective = re.search(r"Effective: ([\d.]+)% of ", page)
    assert effective is not None
    assert float(effective[1]) / 100 == pytest.approx(spent["effective"], abs=0.003)  # but for the rounding of parts
