"""`ddplaunch check` around the ranks: their place, deadline, ends and leftovers; the scripts need no torch."""

import json
import signal

import pytest

from tests.conftest import until
from tests.process.terminal import typed

PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_WORLD_SIZE", "DDPLAUNCH_CHECK")


@pytest.fixture
def check(job):
    """Check a script, given as text, in a job of ten ranks on nodes of four; return the result."""

    def run(text, *options, size=("--world-size", 10, "--nproc-per-node", 4)):
        (job.home / "train.py").write_text(text)
        job.start("check", *size, *options, "train.py")
        return job.wait()

    return run


def test_each_rank_runs_at_its_place_in_the_job_and_none_starts_a_run(check, job):
    text = f"import os; open('place-' + os.environ['RANK'], 'w').write(repr([os.environ[name] for name in {PLACE}]))"
    result = check(text).expect(0)
    found = {path.name: eval(path.read_text()) for path in job.home.glob("place-*")}
    assert sorted(found) == [f"place-{rank}" for rank in (0, 1, 3, 4, 5, 9)]
    assert found["place-5"] == ["5", "1", "10", "4", "1", "3", "1"]
    assert found["place-9"] == ["9", "1", "10", "2", "2", "3", "1"]
    assert "no rank has made a process group" in result.out
    assert not list(job.home.glob("state/ddplaunch/runs/*"))


def test_equal_errors_are_told_once_with_their_line(check):
    result = check("import os\nif int(os.environ['RANK']) < 4:\n    raise ValueError('bad \\x1b[2J')\n").expect(1)
    assert "error: ranks 0-1,3 raised ValueError: bad \\x1b[2J: train.py:3\n" in result.out
    assert "ranks 0-1,3-5,9 of 10: 3 of them did not get through, 0 steps" in result.out
    assert result.err == "ddplaunch: checking ranks 0-1,3-5,9 of 10, rank 0 first\n"


def test_the_hint_for_a_script_that_insists_on_a_gpu_ties_it_to_no_launcher(check):
    result = check("raise AssertionError('Torch not compiled with CUDA enabled')\n", "--ranks", "9").expect(1)
    hint = " ".join(result.out.partition("hint: ")[2].split())
    assert '`device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"`' in hint
    assert "DDPLAUNCH" not in hint


@pytest.mark.parametrize(("options", "said"), [((), "ddplaunch: checking rank 9 of 10\n"), (("--quiet",), "")])
def test_a_check_says_at_its_start_what_it_runs_also_in_a_pipe(check, options, said):
    assert check("pass\n", "--ranks", "9", *options).expect(0).err == said


def test_a_rank_that_ends_without_an_exception_shows_the_end_of_its_output(check):
    text = "import os\nfor _ in range(30000): print('x' * 100)\nprint('.' * 50_000 + 'end', flush=True)\nos._exit(7)\n"
    result = check(text, "--ranks", "9").expect(1)
    assert "error: rank 9 ended with exit status 7\n" in result.out
    assert ".....end\n" in result.out
    assert len(result.out) < 2000
    assert "rank 9 was killed by SIGKILL" in check("import os; os.kill(os.getpid(), 9)", "--ranks", "9").out


def test_a_rank_that_does_not_get_on_is_ended_at_its_deadline_and_says_where_it_was(check):
    result = check(
        "import time\ndef wait():\n    time.sleep(600)\nwait()\n", "--ranks", "0", "--timeout", "1s", "--json"
    )
    [rank] = json.loads(result.expect(1).out)["ranks"]
    assert (rank["end"], rank["where"]) == ("late", "train.py:3 in wait")
    # also one that has no thread left to notice it
    result = check("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n", "--ranks", "0", "--timeout", "1s")
    assert "did not come to the end of step 1 in 1 s" in result.expect(1).out


def test_nothing_that_a_rank_started_is_left(check):
    text = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\n"
    check(text, "--ranks", "0,9").expect(0)  # the fixture looks for what is left


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_check_and_all_ranks(job, signum):
    (job.home / "train.py").write_text("import os, time\nopen('began', 'w').close()\nos.fork()\ntime.sleep(600)\n")
    job.start("check", "--world-size", 8, "train.py")
    until((job.home / "began").exists, "the first rank")
    job.process.send_signal(signum)
    job.wait().expect(128 + signum)


def test_a_check_that_is_killed_leaves_neither_a_rank_nor_its_folder(job):
    (job.home / "train.py").write_text("import time\nopen('began', 'w').close()\ntime.sleep(600)\n")
    job.start("check", "--world-size", 8, "train.py")
    until((job.home / "began").exists, "the first rank")
    assert list((job.home / "tmp").glob("ddplaunch-check-*"))
    job.process.kill()
    job.wait().expect(-signal.SIGKILL)
    job.nothing_left(10)


def test_notes_that_a_program_damages_are_left_out(check):
    text = (
        "import glob, os\n[path] = glob.glob(os.environ['TORCHELASTIC_ERROR_FILE'][:-5])\n"
        'open(path, \'ab\').write(b\'[\' * 5000 + b\'\\n\\0\\n{"progress":{"steps":0,"end":"bribed"}}\\n\')\n'
    )
    check(text, "--ranks", "0").expect(0)


def test_on_a_terminal_the_seconds_of_the_first_rank_tell_how_long_the_others_will_take(job):
    (job.home / "train.py").write_text("pass\n")
    terminal = typed(job, "check", "--world-size", 8, "--ranks", "0,3,7", "train.py")
    terminal.sees("checking ranks 0,3,7 of 8, rank 0 first", "rank 0 took", "2 ranks to go", "ranks 0,3,7 of 8")
    assert terminal.status() == 0
