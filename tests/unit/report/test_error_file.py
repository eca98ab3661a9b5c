"""What stands in an error file is told as far as it can be told, and nothing in it does harm."""

import fcntl
import json
import os
import select
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddplaunch.spec import error_file
from ddplaunch.spec.error_file import LIMIT, read
from ddplaunch.spec.outcome import Frame, WorkerError

OURS: dict[str, Any] = {
    "message": {
        "message": "OutOfMemoryError: no memory",
        "extraInfo": {
            "py_callstack": "Traceback...",
            "timestamp": "1700000000",
            "ddplaunch": {
                "type": "torch.OutOfMemoryError",
                "message": "no memory",
                "monotonic": 12.5,
                "frames": [{"file": "/a.py", "line": 3, "function": "f", "source": "f()"}],
            },
        },
    }
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "error.json"


def told(file: Path, content: object) -> WorkerError | None:
    file.write_text(json.dumps(content))
    return read(str(file))


def changed(**ours: object) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(json.dumps(OURS))
    content["message"]["extraInfo"]["ddplaunch"].update(ours)
    return content


def test_our_own_form_is_read(file: Path) -> None:
    assert told(file, OURS) == WorkerError(
        type="torch.OutOfMemoryError",
        message="no memory",
        traceback="Traceback...",
        frames=(Frame(file="/a.py", line=3, function="f", source="f()"),),
        at=12.5,
    )


@pytest.mark.parametrize(
    ("summary", "kind", "message"),
    [
        ("RuntimeError: boom", "RuntimeError", "boom"),
        ("KeyError: 'a: b'", "KeyError", "'a: b'"),
        ("ValueError: ", "ValueError", ""),
        ("my.pkg.Error: x", "my.pkg.Error", "x"),
        ("one: two: three", "one", "two: three"),
        ("not an exception: x", "Exception", "not an exception: x"),
        ("nothing", "Exception", "nothing"),
        ("RuntimeError: \udc80", "RuntimeError", "?"),
    ],
)
def test_torchs_form_is_read(summary: str, kind: str, message: str, file: Path) -> None:
    torchs = {"message": {"message": summary, "extraInfo": {"py_callstack": "Tb", "timestamp": "17"}, "errorCode": 1}}
    assert told(file, torchs) == WorkerError(type=kind, message=message, traceback="Tb")


def test_torchs_old_form_is_read(file: Path) -> None:
    assert told(file, {"message": "RuntimeError: boom"}) == WorkerError(
        type="RuntimeError", message="boom", traceback=""
    )


@pytest.mark.parametrize("at", [None, "12.5", True, [1], float("nan"), float("inf"), 10**400])
def test_a_time_that_is_none_is_not_known(at: object, file: Path) -> None:
    error = told(file, changed(monotonic=at))
    assert error is not None
    assert error.at is None


@pytest.mark.parametrize(
    "frames",
    [None, {}, "ab", [1, None, {}], [{"file": "/a.py"}], [{"file": 1, "line": 1}], [{"file": "/a.py", "line": True}]],
)
def test_frames_that_are_none_are_left_out(frames: object, file: Path) -> None:
    error = told(file, changed(frames=frames))
    assert error is not None
    assert error.frames == ()


def test_what_is_missing_from_a_frame_is_empty(file: Path) -> None:
    error = told(file, changed(frames=[{"file": "/a.py", "line": 2, "source": 7}, 0]))
    assert error is not None
    assert error.frames == (Frame(file="/a.py", line=2, function="", source=""),)


@pytest.mark.parametrize("extra", [None, [], "x", {"ddplaunch": 3}, {"ddplaunch": {"type": 1}}, {"py_callstack": 5}])
def test_the_message_is_told_even_if_the_rest_is_damaged(extra: object, file: Path) -> None:
    error = told(file, {"message": {"message": "E: x", "extraInfo": extra}})
    assert error == WorkerError(type="E", message="x", traceback="")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"\xff\xfe\x00",
        b"null",
        b"[]",
        b"{}",
        b'"text"',
        b"1" * 5000,
        b'{"message": 3}',
        b'{"message": {}}',
        b'{"message": {"message": ["x"]}}',
        b'{"message": {"message": "E: cut o',
        b"[" * 100_000,
        b'{"message": {"message": "E: ' + b"x" * LIMIT + b'"}}',
    ],
)
def test_what_cannot_be_read_tells_nothing(content: bytes, file: Path) -> None:
    file.write_bytes(content)
    assert read(str(file)) is None


def test_what_is_no_file_tells_nothing_and_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("missing", "fifo", "loop", "", "\0"):
        assert read(str(tmp_path / name)) is None
    assert read("/dev/zero") is None


KEYS = ["message", "extraInfo", "ddplaunch", "py_callstack", "type", "monotonic", "frames", "file", "line", "x"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=20,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(content=JSON)
def test_no_content_does_harm(content: object, file: Path) -> None:
    error = told(file, content)
    assert error is None or f"{error}".encode()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(message=JSON, ours=JSON)
def test_no_content_of_our_form_does_harm(message: object, ours: object, file: Path) -> None:
    content = {"message": {"message": message, "extraInfo": {"py_callstack": ours, "ddplaunch": ours}}}
    error = told(file, content)
    assert error is None or f"{error}".encode()


def test_a_folder_that_an_agent_was_killed_with_is_removed_by_the_next_one(tmp_path: Path) -> None:
    names = ("ddplaunch-errors-a", "ddplaunch-errors-b", "ddplaunch-errors-c", "ddplaunch-data")
    held, abandoned, new, foreign = (tmp_path / name for name in names)
    for folder in (held, abandoned, new, foreign):
        folder.mkdir()
        (folder / "0-0.json").touch()
        if folder != new:
            os.utime(folder, (0, 0))
    lock = os.open(held, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    error_file._remove_abandoned(str(tmp_path))
    os.close(lock)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "ddplaunch-data",
        "ddplaunch-errors-a",
        "ddplaunch-errors-c",
    ]
    assert list(foreign.iterdir())


def test_folders_nested_too_deep_for_recursion_end_neither_the_job_that_made_them_nor_the_next(tmp_path: Path) -> None:
    def nest(folder: str) -> None:
        at = os.open(folder, os.O_RDONLY)
        for _ in range(3000):
            os.mkdir("d", dir_fd=at)
            outer, at = at, os.open("d", os.O_RDONLY, dir_fd=at)
            os.close(outer)
        os.close(at)

    def repeat(removal: Callable[[], None], folder: str) -> None:
        """The time for one removal is limited, so a busy machine needs several."""
        for _ in range(1000):
            if not os.path.exists(folder):
                return
            os.utime(folder, (0, 0))
            removal()

    abandoned = tmp_path / "ddplaunch-errors-a"
    files = error_file.ErrorFiles("a-run", str(tmp_path))
    try:
        nest(files.folder)
        repeat(files.remove, files.folder)
        assert not os.path.exists(files.folder)
        abandoned.mkdir()
        nest(str(abandoned))
        repeat(lambda: error_file._remove_abandoned(str(tmp_path)), str(abandoned))
        assert not abandoned.exists()
    finally:  # pytest's own removal recurses
        subprocess.run(["rm", "-rf", files.folder, abandoned], check=False)


def test_files_of_earlier_generations_are_removed_and_those_that_have_written_are_known(tmp_path: Path) -> None:
    files = error_file.ErrorFiles("a-run", str(tmp_path))
    try:
        for generation, rank in ((0, 0), (1, 0), (1, 12)):
            Path(files.path(generation, rank)).touch()
            Path(f"{files.recorder(generation, rank)}.groups").touch()
        Path(files.folder, "1-3.json.4711").touch()  # is just being written
        assert files.written(1) == {0, 12}
        with open(files.notify, "w") as pipe:
            pipe.write("r")
        files.forget_all_but(1)
        assert files.take_notifications() == b""
        assert files.written(0) == set()
        assert files.written(1) == {0, 12}
        assert sorted(os.listdir(Path(files.recorder(1, 0)).parent)) == ["1-0.groups", "1-12.groups"]
    finally:
        files.remove()
    assert not os.path.exists(files.folder)


def test_what_workers_notify_of_is_taken_whatever_they_write(tmp_path: Path) -> None:
    files = error_file.ErrorFiles("a-run", str(tmp_path))
    try:
        assert select.select([files.notified], [], [], 0)[0] == []
        worker = os.open(files.notify, os.O_WRONLY | os.O_NONBLOCK)
        os.write(worker, b"js")
        os.write(worker, b"r")
        os.close(worker)
        assert set(files.take_notifications()) == {error_file.RAISED, error_file.JOINED, error_file.STORE_WANTED}
        assert select.select([files.notified], [], [], 0)[0] == []  # that no worker has it open is no end
        worker = os.open(files.notify, os.O_WRONLY | os.O_NONBLOCK)
        assert os.write(worker, bytes(1 << 20)) < 1 << 20  # the others have no more room, and the agent no more to read
        os.close(worker)
        assert set(files.take_notifications()) == {0}
        assert select.select([files.notified], [], [], 0)[0] == []
    finally:
        files.remove()


@pytest.mark.parametrize("replaced", ["", "torch"])
def test_nothing_is_removed_behind_a_link_that_the_program_has_put_in_the_place_of_a_folder(tmp_path, replaced):
    others = tmp_path / "data" / "2024"
    others.mkdir(parents=True)
    (tmp_path / "data" / "2024-01.csv").touch()
    (others / "2024-02.csv").touch()
    files = error_file.ErrorFiles("a-run", str(tmp_path))
    folder = Path(files.folder, replaced)
    try:
        shutil.rmtree(folder)
        folder.symlink_to(tmp_path / "data")
        files.forget_all_but(1)
        files.remove()
        assert sorted(path.name for path in (tmp_path / "data").rglob("*")) == ["2024", "2024-01.csv", "2024-02.csv"]
    finally:
        if folder.is_symlink():
            folder.unlink()
        files.remove()
