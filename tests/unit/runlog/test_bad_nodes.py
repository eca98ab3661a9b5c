"""Nodes whose machine has failed are remembered for a week, whatever stands in the file."""

import os
import threading

import pytest

from ddplaunch.record import bad_nodes
from ddplaunch.record.bad_nodes import Failure
from ddplaunch.record.folders import bad_nodes_file
from ddplaunch.system.errors import LaunchError

NOW = 1_800_000_000.0
DAY = 86400.0


def failed(host="gpu07", kind="lost", at=NOW, **more):
    return Failure(host=host, kind=kind, at=at, **more)


@pytest.fixture
def path(tmp_path):
    return bad_nodes_file({"XDG_STATE_HOME": str(tmp_path / "state")})


def test_what_is_added_is_read_until_it_is_a_week_old(path):
    assert bad_nodes.read(path, NOW) == []
    bad_nodes.add(path, [failed(at=NOW - 6 * DAY), failed("b", "gpu")], NOW)
    assert [one.host for one in bad_nodes.read(path, NOW)] == ["gpu07", "b"]
    assert [one.host for one in bad_nodes.read(path, NOW + 2 * DAY)] == ["b"]
    bad_nodes.add(path, [failed("c", at=NOW + 2 * DAY)], NOW + 2 * DAY)
    with open(path) as file:
        assert "gpu07" not in file.read()
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_a_clock_that_was_far_ahead_does_not_keep_a_failure(path):
    bad_nodes.add(path, [failed(at=NOW + 30 * DAY)], NOW)
    assert bad_nodes.read(path, NOW) == []


def test_a_node_is_forgotten_by_its_full_or_short_name(path):
    bad_nodes.add(path, [failed("gpu07.cluster.org"), failed("gpu08"), failed("gpu07")], NOW)
    assert bad_nodes.forget(path, "gpu07", NOW) == 2
    assert [one.host for one in bad_nodes.read(path, NOW)] == ["gpu08"]
    assert bad_nodes.forget(path, "gpu07", NOW) == 0


def test_a_doctor_that_finds_a_node_well_forgets_what_a_doctor_found_and_nothing_else(path):
    bad_nodes.add(path, [failed("a", "slow"), failed("b", "unreachable"), failed("a", "gpu"), failed("c", "slow")], NOW)
    bad_nodes.remember(path, [], NOW, well=["a", "b.cluster.org"])
    assert [(one.host, one.kind) for one in bad_nodes.read(path, NOW)] == [("a", "gpu"), ("c", "slow")]


def test_the_file_stays_small(path):
    for at in range(6):
        bad_nodes.add(path, [failed(f"n{number}", at=NOW + at) for number in range(100)], NOW + at)
    assert len(bad_nodes.read(path, NOW + 6)) == 500
    assert os.stat(path).st_size < 1 << 16


@pytest.mark.parametrize(
    "text",
    [
        b"\0" * 5000,
        b"[" * 100_000,
        b'{"host":"a b","kind":"lost","at":1800000000}\n',
        b'{"host":"a","kind":"cursed","at":1800000000}\n',
        b'{"host":"a","kind":"lost","at":"now"}\n',
        b'{"host":"\\u001b[31m","kind":"lost","at":1800000000}\n',
        b'{"host":"a","kind":"lo',
        b"x" * (2 << 20),
    ],
)
def test_lines_that_are_none_of_ours_are_left_out_and_go(path, text):
    bad_nodes.add(path, [failed("good")], NOW)
    with open(path, "ab") as file:
        file.write(text)
    assert [one.host for one in bad_nodes.read(path, NOW)] == ["good"]
    bad_nodes.add(path, [failed("b")], NOW)
    assert os.stat(path).st_size < 300


def test_what_is_no_file_is_not_read_and_not_followed(path, tmp_path):
    os.makedirs(os.path.dirname(path))
    os.mkfifo(path)
    assert unusable(path) == "not a regular file"
    os.unlink(path)
    (tmp_path / "other").write_text("kept")
    os.symlink(tmp_path / "other", path)
    assert unusable(path) == "a symbolic link"
    with pytest.raises(OSError, match="symbolic links"):
        bad_nodes.add(path, [failed()], NOW)
    assert (tmp_path / "other").read_text() == "kept"


def test_a_file_of_another_user_or_program_is_not_used(path, monkeypatch):
    bad_nodes.add(path, [failed(at=NOW - 30 * DAY)], NOW)
    assert bad_nodes.read(path, NOW) == []
    with open(path, "wb") as file:
        file.write(b"\0" * 5000)
    assert unusable(path) == "no line of it was written by ddplaunch"
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert unusable(path) == f"it belongs to user {user}"


def unusable(path):
    """Why the file cannot be used."""
    with pytest.raises(LaunchError) as raised:
        bad_nodes.read(path, NOW)
    assert raised.value.hint == f"`mv {path} {path}.old` begins a new list"
    return raised.value.message.removeprefix(f"the list of nodes that have failed cannot be used: {path}: ")


def test_hosts_that_write_at_the_same_time_lose_nothing(path):
    def add(number):
        bad_nodes.add(path, [failed(f"n{number}")], NOW)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one.host for one in bad_nodes.read(path, NOW)} == {f"n{number}" for number in range(20)}


def test_the_warning_names_the_nodes_of_the_job_alone_and_what_to_type():
    failures = [failed("a", "gpu", NOW - DAY), failed("a", at=NOW - 7200), failed("c")]
    bad = bad_nodes.among(failures, ["a.cluster.org", "b"])
    assert "--avoid-bad-nodes" not in bad_nodes.warning(bad, NOW, may_avoid=False)
    assert bad_nodes.warning(bad, NOW) == (
        "a.cluster.org was lost 2 h ago, 2 failures in all. `--avoid-bad-nodes` leaves it out where others are enough, "
        "`ddplaunch doctor --forget a.cluster.org` forgets it"
    )
