"""A file that stops a job counts from this user and root alone, whatever another user can do in its folder."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ddplaunch.launcher.node.notices import File, Look

OTHER = 54321
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")


@pytest.fixture
def sticky(tmp_path: Path) -> Path:
    folder = tmp_path / "all"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def given(path: Path, put: Callable[[Path], object]) -> Look | str:
    """What a look finds once `put` has put something at a path where nothing was."""
    file = File(str(path), 0)
    assert file.look() is Look.NOTHING_YET
    put(path)
    return file.look()


def theirs(path: Path) -> None:
    path.write_text("x" * (1 << 20))
    os.chown(path, OTHER, OTHER)


def link_of_theirs(path: Path) -> None:
    path.symlink_to("/etc/hostname")
    os.lchown(path, OTHER, OTHER)


def test_a_file_of_this_user_counts_in_a_folder_of_all(sticky):
    assert given(sticky / "stop", Path.touch) is Look.NOTICE


def test_a_link_of_this_user_counts(sticky, tmp_path):
    (tmp_path / "real").touch()
    assert given(sticky / "stop", lambda path: path.symlink_to(tmp_path / "real")) is Look.NOTICE


@pytest.mark.parametrize(("put", "what"), [(theirs, "it belongs to"), (link_of_theirs, "it is a link of")])
def test_what_another_user_puts_there_does_not_count_and_names_them(sticky, put, what):
    assert given(sticky / "stop", put) == f"{what} user {OTHER}, and only you or root can give the notice"


def test_a_folder_that_is_a_link_of_another_user_does_not_count(sticky, tmp_path):
    (sticky / "in").symlink_to(tmp_path)
    os.lchown(sticky / "in", OTHER, OTHER)
    said = given(sticky / "in" / "stop", Path.touch)
    assert said == f"{sticky}/in is a link of user {OTHER}, and only you or root can give the notice"


def test_a_file_of_theirs_that_changes_does_not_count_and_ours_in_its_place_does(sticky):
    path = sticky / "stop"
    theirs(path)
    file = File(str(path), 0)
    assert "belongs to user" in str(file.look())
    path.write_text("more")
    assert "belongs to user" in str(file.look())
    path.unlink()
    path.touch()
    assert file.look() is Look.NOTICE


def linked(path: Path) -> None:
    os.link(path.with_name("old"), path)


def moved(path: Path) -> None:
    path.with_name("old").rename(path)


@pytest.mark.parametrize("put", [linked, moved])
@pytest.mark.parametrize(("mode", "owner"), [(0o777, 0), (0o755, OTHER)])
def test_an_old_file_of_ours_that_another_user_may_have_put_there_does_not_count(tmp_path, put, mode, owner):
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "old").touch()
    os.utime(folder / "old", (1000, 1000))
    os.chown(folder, owner, owner)
    folder.chmod(mode)
    said = given(folder / "stop", put)
    assert str(said).startswith("it was moved or linked there, which another user can do: ")
    assert str(folder) in str(said)
    (folder / "stop").unlink()
    assert given(folder / "stop", Path.touch) is Look.NOTICE, "written there just now"


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.mkdir()])
def test_only_a_file_counts(sticky, make):
    assert str(given(sticky / "stop", make)).endswith("and only a file counts")
