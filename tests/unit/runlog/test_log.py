"""A worker's log with an upper size."""

import errno
import os
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.record.log import BoundedLog

MARKER = re.compile(rb"\n?\[ddplaunch: (\d+) bytes are left out here: the log had reached its limit\]\n")


def on_disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


@given(
    pieces=st.lists(st.tuples(st.integers(0, 200), st.sampled_from([1, 9, 50, 1000])), max_size=20),
    limit=st.sampled_from([60, 600, 1001]),
)
def test_head_and_tail_stay_the_rest_is_counted_and_the_limit_holds(pieces: list[tuple[int, int]], limit: int) -> None:
    with TemporaryDirectory() as folder:
        check(Path(folder), pieces, limit)


def check(folder: Path, pieces: list[tuple[int, int]], limit: int) -> None:
    path = folder / "log"
    log, data = BoundedLog(path, limit), b""
    for size, line in pieces:
        piece = b"".join(b"%d" % (position % 10) if position % line else b"\n" for position in range(size))
        log.write(piece)
        data += piece
        assert on_disk(folder) <= limit
    log.close()
    assert log.error is None
    assert os.listdir(folder) == ["log"]

    kept = path.read_bytes()
    if len(data) <= limit // 2:
        assert kept == data
    if kept != data:
        found = MARKER.search(kept)
        assert found is not None
        head, tail = kept[: found.start()], kept[found.end() :]
        assert data.startswith(head)
        assert data.endswith(tail)
        missing = len(data) - len(head) - len(tail) - int(found[1])
        # the newline before the marker is the head's own, or was added after a cut line
        assert missing == 0 or (missing == 1 and data.startswith(head + b"\n"))


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk that is full after so many bytes of one file; Python ignores the SIGXFSZ that comes with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_was_written_is_in_the_file_at_once(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "log")
    log.write(b"a")
    assert (tmp_path / "log").read_bytes() == b"a"
    log.close()


def test_a_log_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "log", 60)
    log.write(b"x" * 35)
    assert {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {
        "log": 0o600,
        "log.tail-1": 0o600,
    }
    log.close()


def test_the_marker_says_how_much_is_left_out(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "log", 60)
    for number in range(100):
        log.write(b"line %2d\n" % number)
    log.close()
    assert (tmp_path / "log").read_text() == (
        "line  0\nline  1\nline  2\n"
        "[ddplaunch: 760 bytes are left out here: the log had reached its limit]\n"
        "line 98\nline 99\n"
    )


def test_nothing_is_left_out_of_an_unbounded_log(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "log", None)
    for _ in range(100):
        log.write(b"x" * 100)
    log.close()
    assert (tmp_path / "log").read_bytes() == b"x" * 10_000


def test_the_next_generation_appends_and_adds_a_third_of_the_limit_to_a_full_file(tmp_path: Path) -> None:
    for written in b"x" * 28, b"x" * 16, b"y\n" * 100:
        log = BoundedLog(tmp_path / "log", 60)
        log.write(written)
        log.close()
    assert (tmp_path / "log").read_bytes() == (
        b"x" * 44 + b"\n[ddplaunch: 180 bytes are left out here: the log had reached its limit]\n" + b"y\n" * 10
    )


def test_a_full_disk_is_noted_and_the_rest_dropped() -> None:
    log = BoundedLog("/dev/full")
    assert log.error is None
    log.write(b"a")
    assert log.error is not None
    assert log.error.errno == errno.ENOSPC
    first = log.error
    log.write(b"b")
    log.close()
    assert log.error is first


def test_what_still_fits_is_kept_and_what_does_not_is_counted(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "log")
    with files_of_at_most(10):
        log.write(b"x" * 7)
        log.write(b"y" * 7)
        log.write(b"z" * 7)
    log.close()
    assert log.error is not None
    assert (tmp_path / "log").read_text() == "xxxxxxxyyy\n[ddplaunch: 11 bytes are missing here: File too large]\n"


def test_an_end_that_finds_no_room_stays_beside_the_log(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "log", 60)
    log.write(b"x" * 30 + b"y" * 10 + b"z" * 10)
    with files_of_at_most(45):
        log.close()
    assert log.error is not None
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {
        "log": b"x" * 30 + b"y" * 10,
        "log.tail-2": b"z" * 10,
    }


def test_a_folder_that_cannot_be_written_is_noted(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "missing" / "log")
    assert isinstance(log.error, FileNotFoundError)
    log.write(b"a")
    log.close()


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to(tmp_path / "precious")
    log = BoundedLog(tmp_path / "log")
    assert log.error is not None
    assert log.error.errno == errno.ELOOP
    log.close()
    assert not (tmp_path / "precious").exists()


def test_a_folder_that_is_deleted_meanwhile_does_no_harm(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    log = BoundedLog(folder / "log", 60)
    log.write(b"x" * 31)
    shutil.rmtree(folder)
    log.write(b"x" * 5)
    assert log.error is None
    log.write(b"x" * 100)
    assert isinstance(log.error, FileNotFoundError)
    log.close()
    assert not folder.exists()


def test_close_gives_every_descriptor_back(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    log = BoundedLog(tmp_path / "log", 60)
    log.write(b"x" * 500)
    log.close()
    log.close()
    log.write(b"dropped")
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_a_limit_smaller_than_any_line_still_ends(tmp_path: Path, limit: int) -> None:
    log = BoundedLog(tmp_path / "log", limit)
    log.write(b"ab\n" * 5)
    log.close()
    assert (tmp_path / "log").read_bytes().endswith(b"\n")
    assert len(os.listdir(tmp_path)) == 1
