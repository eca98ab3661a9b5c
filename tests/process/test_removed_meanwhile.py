"""The files of ddplaunch itself are gone, or are those of another version, while a job runs: an upgrade, a lost file server."""

from __future__ import annotations

import shutil
from pathlib import Path

import ddplaunch
from tests.conftest import until

PROGRAM = """
from signs import put, wait
put("runs")
wait("removed")
with open("/proc/self/environ") as file:
    environ = dict(line.partition("=")[::2] for line in file.read().split(chr(0)))
with open(environ["DDPLAUNCH_NOTIFY"], "w") as fifo:
    fifo.write("j")  # as torch's first process group has it done
wait("enough")
"""


def test_a_job_that_nothing_happens_to_goes_on_without_what_is_no_longer_found(job, program, tmp_path):
    installed = tmp_path / "installed"
    # what first looks at the workers is gone already: without --hang-timeout that would be a minute and a half after the start
    package = Path(ddplaunch.__file__).parent
    shutil.copytree(package, installed / "ddplaunch", ignore=shutil.ignore_patterns("observer*"))
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    printed = tmp_path / "printed"
    with printed.open("wb") as stderr:
        job.start(
            *("--straggler-check", "1s", "--hang-timeout", "1s", script),
            env={"PYTHONPATH": f"{installed}:{program('signs').parent}"},
            stderr=stderr,
        )
        job.sign("runs")
        shutil.rmtree(installed)
        (job.home / "signs" / "removed").touch()
        for without in ("stragglers are no longer looked for", "a job in which nothing moves is no longer noticed"):
            until(lambda text=without: f"warning: {text}: ModuleNotFoundError: " in printed.read_text(), without)
        (job.home / "signs" / "enough").touch()
        assert job.wait().status == 0, printed.read_text()
    assert printed.read_text().count("warning: ") == 2
    job.nothing_left()
