"""What the workers write, as it comes out of the real command: on the console and in the logs."""

import json
import re

import pytest

from tests.process.terminal import typed


@pytest.fixture
def show(job, program):
    """Run writes.py and give the bytes of the command's stdout and stderr, then prove that nothing is left."""

    def show(*args: object, workers: int = 2, options: tuple[object, ...] = (), status: int = 0, **popen):
        process = job.start("--nproc-per-node", workers, *options, program("writes"), *args, **popen)
        out, err = process.communicate(timeout=60)
        assert process.returncode == status, err.decode()
        job.nothing_left()
        return out, err

    return show


def whole_lines(out: bytes, rank: int) -> list[bytes]:
    """The lines of one rank; every line of the output must be some rank's."""
    lines = out.splitlines(keepends=True)
    assert all(re.match(rb"\[\d+\] ", line) for line in lines)
    return [line[4:] for line in lines if line.startswith(b"[%d] " % rank)]


# --- the modes


def test_prefix_puts_the_rank_before_each_line_and_keeps_the_streams_apart(show):
    out, err = show("both", workers=3)
    assert sorted(out.splitlines()) == [b"[0] out of 0", b"[1] out of 1", b"[2] out of 2"]
    assert {b"[0] err of 0", b"[1] err of 1", b"[2] err of 2"} <= set(err.splitlines())


def test_the_first_lines_name_the_run_and_its_folder_and_fit_a_terminal_of_80_columns(show, job):
    _, err = show("both")
    first, logs = err.decode().splitlines()[:2]
    name = job.folder.name.rpartition("-")[2]
    assert re.fullmatch(rf"ddplaunch: {name}: 2 workers, \w+ \(.*\)", first)
    assert logs == f"ddplaunch: logs in {job.folder}"
    assert len(first) <= 80
    assert len(logs.replace(str(job.home), "~/.local")) <= 80


@pytest.mark.parametrize(("columns", "between"), [(80, " "), (60, "\r\n  ")])
def test_on_a_narrow_terminal_the_folder_of_a_run_has_a_line_of_its_own(job, program, columns, between):
    shown = typed(job, "--nproc-per-node", 2, program("writes"), "both", columns=columns).sees_the_end()
    assert f"ddplaunch: logs in{between}~/state/ddplaunch/runs/{job.folder.name}\r\n" in shown


def test_raw_shows_lines_as_they_are(show):
    out, _ = show("both", workers=3, options=("--output", "raw"))
    assert sorted(out.splitlines()) == [b"out of 0", b"out of 1", b"out of 2"]


def test_collapse_shows_a_line_of_several_ranks_once(show):
    out, _ = show("same", workers=4, options=("--output", "collapse"))
    lines = out.splitlines()
    assert lines.count(b"[0-3] equal") == 1
    assert lines.count(b"[0-3] equal too") == 1
    assert sorted(line for line in lines if b"mine" in line) == [b"[%d]   mine is %d" % (n, n) for n in range(4)]
    assert len(lines) == 6


def test_rank0_shows_rank_0_only_and_none_shows_nobody(show, job):
    assert show("both", workers=3, options=("--output", "rank0"))[0] == b"out of 0\n"
    out, err = show("both", workers=3, options=("--output", "none"))
    assert out == b""
    assert b"err of" not in err
    for rank in range(3):
        assert (job.folder / f"rank-{rank}.out").read_bytes() == b"out of %d\n" % rank


def test_one_worker_is_passed_through_as_it_is(show):
    assert show("unfinished", workers=1)[0] == b"first\nno newline"
    for behaviour, status in (("then_exits", 7), ("then_is_killed", 137)):
        assert show(behaviour, 1_000_000, workers=1, status=status)[0] == (b"y" * 99 + b"\n") * 10_000


# --- whole lines


def test_lines_are_whole_when_four_workers_write_letter_by_letter(show, job):
    out, _ = show("letters", 200, workers=4)
    for rank in range(4):
        expected = [b"<%d:%d:%b>\n" % (rank, at, b"abcdefghij" * (at % 7)) for at in range(200)]
        assert whole_lines(out, rank) == expected
        assert (job.folder / f"rank-{rank}.out").read_bytes() == b"".join(expected)


def test_twenty_thousand_lines_of_each_of_four_workers_are_neither_torn_nor_lost(show):
    out, _ = show("prints", 20_000, workers=4)
    for rank in range(4):
        assert whole_lines(out, rank) == [b"<%d %d>\n" % (rank, at) for at in range(20_000)]


def test_a_line_of_ten_megabytes_stays_whole(show):
    out, _ = show("long", 10_000_000, workers=2)
    assert sorted(out.splitlines()) == [b"[%d] " % rank + b"%d" % rank * 10_000_000 for rank in range(2)]


def test_bytes_that_are_no_text_and_letters_in_two_halves_come_out_as_they_are(show):
    out, _ = show("crooked")
    assert sorted(out.splitlines()) == sorted([b"[0] \xff\xfe\x80", "[0] gr\u00fc\u00df".encode(), b"[1] between"])


def test_a_last_line_without_a_newline_is_shown_and_gets_one(show, job):
    out, _ = show("unfinished")
    for rank in range(2):
        assert whole_lines(out, rank) == [b"first\n", b"no newline\n"]
    assert (job.folder / "rank-1.out").read_bytes() == b"first\nno newline"


@pytest.mark.parametrize(("behaviour", "status"), [("then_exits", 7), ("then_is_killed", 137)])
def test_nothing_is_lost_when_a_worker_dies_right_after_a_megabyte(show, job, behaviour, status):
    out, _ = show(behaviour, 1_000_000, status=status)
    assert out == (b"[0] " + b"y" * 99 + b"\n") * 10_000
    assert (job.folder / "rank-0.out").read_bytes() == (b"y" * 99 + b"\n") * 10_000


def test_a_child_that_goes_on_writing_does_not_hide_that_its_worker_ended(show, job):
    show("leaves_a_writer", workers=2, options=("--output", "none", "--grace-period", "60"), status=3)
    assert min(event["seconds"] for event in job.events("worker_exited")) < 20
    assert job.events("job_ended")[0]["seconds"] < 40


# --- torchrun's options


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (("-r", "3"), ()),
        (("-r", "1"), ("err0", "err1")),
        (("-r", "2"), ("out0", "out1")),
        (("-t", "3"), ("out0", "out1", "err0", "err1")),
        (("-r", "3", "-t", "1"), ("out0", "out1")),
        (("-r", "0:3,1:1"), ("err1",)),
        (("--local-ranks-filter", "1"), ("out1", "err1")),
        (("--local_ranks_filter=0", "-r", "2"), ("out0",)),
    ],
    ids=" ".join,
)
def test_redirects_tee_and_filter_choose_what_is_shown_and_logs_have_all(show, job, options, shown):
    out, err = show("both", options=options)
    assert {line.replace(" of ", "") for line in re.findall(r"(?:out|err) of \d", (out + err).decode())} == set(shown)
    assert [(job.folder / f"rank-{rank}.err").read_bytes() for rank in range(2)] == [b"err of 0\n", b"err of 1\n"]


def test_log_dir_lays_the_logs_out_as_torchrun_does(job, program):
    options = ("--log-dir", "logs", "--rdzv-id", "myjob", "--max-restarts", "1")
    job.run("--nproc-per-node", 2, *options, program("behave"), "1=raises")
    (run,) = (job.home / "logs").iterdir()
    assert re.fullmatch(r"myjob_\w{8}", run.name)
    assert {str(path.relative_to(run)) for path in run.rglob("attempt_*/*/*")} == {
        f"attempt_{attempt}/{place}"
        for attempt in range(2)
        for place in ("0/stdout.log", "0/stderr.log", "1/stdout.log", "1/stderr.log", "1/error.json")
    }
    assert "boom of rank 1" in (run / "attempt_1/1/stderr.log").read_text()
    error = json.loads((run / "attempt_0/1/error.json").read_text())
    assert error["message"]["message"] == "ValueError: boom of rank 1"


def test_a_second_run_of_the_same_id_gets_a_folder_of_its_own(show, job):
    for _ in range(2):
        show("both", options=("--log-dir", "logs", "--rdzv-id", "myjob"))
    assert len(list((job.home / "logs").glob("myjob_*/attempt_0/1/stdout.log"))) == 2


def test_log_dir_dev_null_keeps_nothing(show, job):
    out, err = show("both", options=("--log-dir", "/dev/null"))
    assert b"[1] out of 1\n" in out
    assert b"logs in" not in err
    assert re.search(rb"(?m)^ddplaunch: [a-z0-9]{4}: 2 workers, gloo \(", err)
    assert not (job.home / "state" / "ddplaunch").exists()


def test_duplicate_filters_copy_the_lines_that_hold_a_text(show, job):
    filters = ("--duplicate-stdout-filters", "mine is 1,too", "--duplicate-stderr-filters", "nothing")
    show("same", options=("--log-dir", "logs", *filters))
    (attempt,) = (job.home / "logs").glob("*/attempt_0")
    copied = (attempt / "filtered_stdout.log").read_text().splitlines()
    assert sorted(copied) == ["[default0]:equal too", "[default1]:equal too", "[default1]:mine is 1"]
    assert (attempt / "filtered_stderr.log").read_text() == ""


def test_the_prefix_template_of_torchrun_works(show):
    template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${role_name}/$rank/$local_rank> "}
    out, _ = show("both", options=("--role", "trainer"), env=template)
    assert sorted(out.splitlines()) == [b"trainer/0/0> out of 0", b"trainer/1/1> out of 1"]


@pytest.mark.parametrize("options", [("--role", "gpu02-"), ("--role", "gpu02-", "--tee", "1")])
def test_the_prefix_is_torchruns_where_its_options_ask_for_one(show, options):
    out, _ = show("both", options=options)
    assert sorted(out.splitlines()) == [b"[gpu02-0]:out of 0", b"[gpu02-1]:out of 1"]
    out, _ = show("both", options=(*options, "--output", "prefix"))
    assert sorted(out.splitlines()) == [b"[0] out of 0", b"[1] out of 1"]


# --- the command's own words


def test_stdout_holds_only_what_the_workers_wrote(show):
    out, err = show("both", options=("-v",))
    assert sorted(out.splitlines()) == [b"[0] out of 0", b"[1] out of 1"]
    assert [line for line in err.splitlines() if re.fullmatch(rb"ddplaunch: rank [01] is pid \d+", line)]


def test_by_default_there_are_two_lines_at_the_start_and_one_at_the_end(show):
    _, err = show("both")
    own = [line for line in err.splitlines() if line.startswith(b"ddplaunch: ")]
    assert len(own) == 3
    assert b"2 workers, gloo" in own[0]
    assert b"2 workers finished" in own[2]
    assert err.splitlines()[0] == own[0]
    assert err.splitlines()[-1] == own[2]


def test_quiet_says_nothing_but_errors(show):
    _, err = show("both", options=("-q",))
    assert sorted(err.splitlines()) == [b"[0] err of 0", b"[1] err of 1"]
    _, err = show("then_exits", 100, options=("-q",), status=7)
    assert err.startswith(b"error: rank ")
