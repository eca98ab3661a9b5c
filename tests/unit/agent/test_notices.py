"""What a look at a file or a command finds: a notice, none yet, or why there may never be one."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ddplaunch.launcher.node import notices
from ddplaunch.launcher.node.notices import Command, File, Look, Watched

ENV = {"PATH": os.environ["PATH"]}
LONG_AGO, LATER = 1_000, int(time.time()) + 86400  # seconds; the tests may take long


def looked_at(path: Path) -> File:
    file = File(str(path), time.time_ns())
    assert file.look() is Look.NOTHING_YET
    return file


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "notice"
    path.touch()
    os.utime(path, (LONG_AGO, LONG_AGO))
    return path


def write_as_old(path: Path) -> None:
    path.write_text("now")
    os.utime(path, (LONG_AGO, LONG_AGO))


def just_as_old(path: Path) -> Path:
    other = path.with_name("other")
    other.touch()
    os.utime(other, (LONG_AGO, LONG_AGO))
    while other.stat().st_ctime_ns == path.stat().st_ctime_ns:  # until the clock of the disk goes on
        os.utime(other, (LONG_AGO, LONG_AGO))
    return other


CHANGES: dict[str, Callable[[Path], object]] = {
    "written": lambda path: path.write_text("now"),
    "touched": lambda path: path.touch(),
    "written_and_given_its_old_time": write_as_old,
    "replaced_by_one_just_as_old": lambda path: just_as_old(path).replace(path),
}
ELSE: dict[str, Callable[[Path], object]] = {
    "nothing": lambda _: None,
    "other_rights": lambda path: path.chmod(0o600),
    "a_hard_link": lambda path: os.link(path, path.parent / "backup"),
    "read": lambda path: os.utime(path, (LATER, LONG_AGO)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_is_a_notice(old, change):
    file = looked_at(old)
    CHANGES[change](old)
    assert file.look() is Look.NOTICE


@pytest.mark.parametrize("change", ELSE)
def test_what_changes_neither_the_content_nor_which_file_it_is_gives_no_notice(old, change):
    file = looked_at(old)
    ELSE[change](old)
    assert file.look() is Look.NOTHING_YET


def test_a_file_that_is_moved_there_is_a_notice_however_old_it_is(tmp_path, old):
    file = looked_at(tmp_path / "stop")
    old.replace(tmp_path / "stop")
    assert file.look() is Look.NOTICE


def test_what_happened_while_the_job_started_counts_and_what_was_before_does_not(old):
    began = int((LONG_AGO + 1) * 1e9)
    old.chmod(0o600)
    assert File(str(old), began).look() is Look.NOTHING_YET
    os.utime(old, (LATER, LATER))
    assert File(str(old), began).look() is Look.NOTICE
    assert File(str(old), int(LATER * 1e9)).look() is Look.NOTHING_YET, "it was given that time before"


def test_a_folder_is_named_and_what_is_made_in_it_is_no_notice_but_a_file_in_its_place_is(tmp_path):
    path = tmp_path / "notice"
    file = looked_at(path)
    path.mkdir()
    assert file.look() == "it is a folder, and only a file counts"
    (path / "inside").touch()
    assert file.look()
    (path / "inside").replace(tmp_path / "inside")
    path.rmdir()
    (tmp_path / "inside").replace(path)
    assert file.look() is Look.NOTICE


@pytest.mark.parametrize("rest", ["x", "x/y"])
def test_a_file_in_place_of_the_folder_is_named(tmp_path, rest):
    (tmp_path / "file").touch()
    assert File(f"{tmp_path}/file/{rest}", 0).look() == f"{tmp_path}/file is a file, not a folder"
    assert (
        File(f"{tmp_path}/none/{rest}", 0).look()
        == f"there is no folder {os.path.dirname(f'{tmp_path}/none/{rest}')} yet"
    )


def test_an_error_that_passes_changes_nothing(old):
    file = looked_at(old)
    link = old.parent / "link"
    old.replace(link)
    old.symlink_to(old)
    with pytest.raises(OSError, match="symbolic links"):
        file.look()
    link.replace(old)
    assert file.look() is Look.NOTHING_YET


class Told(Watched):
    """One whose looks find what it is given."""

    looks_every = 0.0

    def __init__(self, *found: object) -> None:
        super().__init__()
        self.found = list(found)

    def look(self) -> Look | str:
        found = self.found.pop(0)
        if isinstance(found, OSError):
            raise found
        assert isinstance(found, Look | str)
        return found


def test_each_problem_is_told_once_and_the_next_look_may_find_the_notice():
    stale, nothing = OSError(errno.ESTALE, "Stale file handle"), Look.NOTHING_YET
    watched = Told(nothing, stale, stale, nothing, "it is a folder", stale, "it is a folder", nothing, Look.NOTICE)
    assert [watched.wait() for _ in range(3)] == ["stale file handle. ddplaunch tries again", "it is a folder", ""]


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("true", Look.NOTICE),
        ("false", Look.NOTHING_YET),
        ("exit 2", Look.NOTHING_YET),
        ("sleep 60", "it was killed after 0.5 s. ddplaunch tries again"),
        ("/nonexistent", "the shell cannot run it (exit status 127). ddplaunch tries again"),
        ("x" * 200_000, "the shell cannot run it (exit status 126). ddplaunch tries again"),
    ],
    ids=["succeeds", "fails", "fails_as_syntax_does", "hangs", "is_not_there", "is_too_long"],
)
def test_what_a_command_tells(monkeypatch, command, found):
    monkeypatch.setattr(notices, "COMMAND_LIMIT", 0.5)
    assert Command(command, ENV).look() == found


@pytest.mark.parametrize("command", ["if", "echo 'now", "test -e notice &&"])
def test_a_command_that_the_shell_cannot_read_is_named_with_what_the_shell_says(command):
    found = Command(command, ENV).look()
    assert isinstance(found, str)
    assert found.startswith("the shell cannot read it: ")
    assert "yntax error" in found or "unexpected" in found
