"""The words behind `ddplaunch submit`: which are sbatch's, which ours, and where the job begins."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.cli.submit import _OUR_OPTIONS, _REFUSED, request_of, submit
from ddplaunch.system.errors import LaunchError
from ddplaunch.tools.submit.script import FLAGS, KNOWN, OPTIONAL, SHORT, VALUED, SbatchOption, SubmitRequest


def split(words: list[str]) -> SubmitRequest:
    """What is asked for by the words behind `ddplaunch submit`."""
    with submit.make_context("submit", words) as ctx:
        return request_of(ctx)


UNDERSTOOD = [
    ("--nodes 2 --", "--nodes=2"),
    ("--nodes=2 --", "--nodes=2"),
    ("-N 2 --", "--nodes=2"),
    ("-N2 --", "--nodes=2"),
    ("-n -1 --", "--ntasks=-1"),
    ("--hold --", "--hold"),
    ("-HO --", "--hold --overcommit"),
    ("-HN2 --", "--hold --nodes=2"),
    ("-HN 2 --", "--hold --nodes=2"),
    ("--exclusive --", "--exclusive"),
    ("--exclusive=user --", "--exclusive=user"),
    ("--nice -p a --", "--nice --partition=a"),
    ("-k --", "--no-kill"),
    ("--part a --", "--partition=a"),
    ("--comment= --", "--comment="),
    ("--comment '' --", "--comment="),
    ("--comment 'a -- b' --", "'--comment=a -- b'"),
    ("--gres gpu:4,nic:1 --", "--gres=gpu:4,nic:1"),
    ("--future --", "--future"),
    ("--future=3 --", "--future=3"),
    ("--future 3 --", "--future=3"),
    ("--future --hold --", "--hold --future"),
    ("-Z 3 --", "-Z3"),
    ("-Z --", "-Z"),
    ("-- --nodes 2", ""),
]


@pytest.mark.parametrize(("line", "meaning"), UNDERSTOOD)
def test_options_of_sbatch_are_read_as_sbatch_reads_them(line: str, meaning: str) -> None:
    assert [option.argument for option in split(shlex.split(line)).options] == shlex.split(meaning)


def test_what_is_ours_does_not_reach_sbatch() -> None:
    request = split(["--print", "-W", "--nodes", "2", "--follow", "--parsable", "--", "--nproc-per-node", "4", "a.py"])
    assert request == SubmitRequest(
        options=(SbatchOption("nodes", "2"),), print=True, wait=True, follow=True, parsable=True,
        job=("--nproc-per-node", "4", "a.py"),
    )  # fmt: skip


def test_the_job_may_have_a_mark_of_its_own() -> None:
    assert split(["--", "--", "a.py", "--", "x"]).job == ("--", "a.py", "--", "x")


def test_the_last_value_counts() -> None:
    request = split(["--nodes", "2", "-N", "3", "--"])
    assert request.value("nodes") == "3"
    assert request.has("nodes", "ntasks")
    assert not request.has("ntasks")


SYNTAX = "ddplaunch submit [SBATCH OPTIONS] -- [OPTIONS] SCRIPT [ARGS]..."
REFUSED = [
    ("train.py", "-- is missing between the options of sbatch and the job", "type `ddplaunch submit -- train.py`"),
    ("-N 2 'my train.py' --lr 1", "-- is missing between the options of sbatch and the job",
     "type `ddplaunch submit -N 2 -- 'my train.py' --lr 1`"),
    ("--gres gpu 4 -- a.py", "4 before -- is neither an option of sbatch nor a value of one", SYNTAX),
    ("", "no job to submit: -- and a SCRIPT are missing", SYNTAX),
    ("--nodes 2", "no job to submit: -- and a SCRIPT are missing", SYNTAX),
    ("--nodes", "--nodes needs a value", None),
    ("--nodes -- a.py", "--nodes needs a value, but -- follows", None),
    ("-N --time 4 -- a.py", "-N needs a value, but --time follows", "if --time is its value, type `--nodes=--time`"),
    ("--hold=1 -- a.py", "--hold takes no value", "type `--hold`"),
    ("--print=1 -- a.py", "--print takes no value", "type `--print`"),
    ("--wrap x -- a.py", "--wrap cannot be given to `ddplaunch submit`",
     "ddplaunch writes the script: type the job after --"),
    ("--output= -- a.py", "--output names no file", "leave it out, or type --output=%x-%j.out"),
    ("--nproc-per-node 4 -- a.py", "--nproc-per-node is an option of ddplaunch, not of sbatch",
     f"type it after --: {SYNTAX}"),
    ("'--x\ntouch pwned\n' -- a.py", "'--x\\ntouch pwned\\n' is not an option of sbatch", SYNTAX),
    ("--comment 'a\nb' -- a.py", "the value of --comment, 'a\\nb', contains a character that an #SBATCH line cannot hold",
     "leave line breaks and control characters out"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message", "hint"), REFUSED)
def test_what_cannot_be_meant_is_one_clear_error(line: str, message: str, hint: str | None) -> None:
    with pytest.raises(LaunchError) as caught:
        split(shlex.split(line))
    assert (caught.value.message, caught.value.hint, caught.value.status) == (message, hint, 2)


NO_FILE = (("output", ""), ("error", ""))


@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.sampled_from(sorted(VALUED - {"wrap"})), st.from_regex(r"[a-z0-9:,= ]{0,9}", fullmatch=True)
            ).filter(lambda given: given not in NO_FILE),
            st.tuples(st.sampled_from(sorted((OPTIONAL | FLAGS) - {*_OUR_OPTIONS, *_REFUSED})), st.none()),
        ),
        unique_by=lambda option: option[0],
    ),
    st.lists(st.text()),
    st.booleans(),
)
def test_whatever_is_given_arrives(given: list[tuple[str, str | None]], job: list[str], joined: bool) -> None:
    options = [SbatchOption(*one) for one in given]
    typed = []
    for option in options:
        typed += [option.argument] if joined or option.value is None else [f"--{option.name}", option.value]
    request = split([*typed, "--", *job])
    assert list(request.options) == options
    assert list(request.job) == job


def test_the_table_is_consistent() -> None:
    assert not VALUED & OPTIONAL and not VALUED & FLAGS and not OPTIONAL & FLAGS
    assert set(SHORT.values()) <= KNOWN
