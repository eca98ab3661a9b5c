"""The socket of a run is found and reached wherever it lies, and only a folder that nobody else can touch is taken for it."""

import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from ddplaunch.record import run_socket
from ddplaunch.record.run_socket import SocketPath
from ddplaunch.record.window.questions import AskStatus
from ddplaunch.tools.runs import client, find


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of the folder for sockets that lie in no run folder."""
    folder = tmp_path / "runtime"
    monkeypatch.setattr(run_socket, "runtime_folder", lambda _uid: str(folder))
    return folder


def test_no_path_is_too_long(tmp_path):
    folder = tmp_path.joinpath(*["x" * 50] * 5)
    folder.mkdir(parents=True)
    fd = os.open(folder, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as sock:
        run_socket.listen(sock, fd, run_socket.NAME)
        assert stat.S_IMODE(os.stat(folder / run_socket.NAME).st_mode) == 0o600
        assert os.listdir(folder) == [run_socket.NAME]
        with SocketPath(str(folder), run_socket.NAME).connect() as found:
            assert run_socket.uid_of(found) == os.getuid()
    os.close(fd)


def test_what_cannot_be_made_leaves_nothing(tmp_path):
    (tmp_path / "socket").mkdir()
    fd = os.open(tmp_path, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as sock, pytest.raises(OSError, match="directory"):
        run_socket.listen(sock, fd, "socket")
    assert os.listdir(tmp_path) == ["socket"]
    os.close(fd)


def test_only_a_folder_of_this_user_alone_is_taken(runtime, tmp_path):
    with pytest.raises(FileNotFoundError):
        run_socket.open_runtime_folder()
    assert list(find.socket_paths({"XDG_STATE_HOME": str(tmp_path)})) == []
    os.close(run_socket.open_runtime_folder(make=True))
    assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
    runtime.chmod(0o750)
    with pytest.raises(PermissionError):
        run_socket.open_runtime_folder(make=True)
    runtime.rmdir()
    runtime.symlink_to(tmp_path)
    with pytest.raises(OSError, match="directory"):
        run_socket.open_runtime_folder(make=True)
    runtime.unlink()
    if os.getuid() == 0:
        runtime.mkdir(0o700)
        os.chown(runtime, 12345, -1)
        with pytest.raises(PermissionError):
            run_socket.open_runtime_folder(make=True)


def test_what_refuses_is_removed_among_those_of_this_host_only(runtime, tmp_path):
    for folder in (runtime, tmp_path / "run"):
        folder.mkdir(0o700)
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(folder / "dead"))
        assert client.ask_all([SocketPath(str(folder), "dead")], AskStatus(), 0.1) == []
    assert not (runtime / "dead").exists()
    assert (tmp_path / "run/dead").exists()  # it may be of a run on another host


@pytest.mark.parametrize(
    ("reply", "problem"),
    [(b"", None), (b"\xff\xff\xff\xff", "frame"), (b"\0\0\0\2[]", "understand"), (b"\0\0\0\x10", "does not answer")],
)
def test_what_is_no_reply_is_not_believed(runtime, tmp_path, monkeypatch, reply, problem):
    monkeypatch.setattr(client, "_MARGIN", 0.1)
    runtime.mkdir(0o700)
    over = threading.Event()

    def serve() -> None:
        sock, _ = false.accept()
        with sock:
            sock.sendall(reply)
            if reply:
                over.wait()

    with socket.socket(socket.AF_UNIX) as false:
        false.bind(str(runtime / "false.1"))
        false.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        found = client.ask_all([SocketPath(str(runtime), "false.1")], AskStatus(), 0.0)
        over.set()
        thread.join()
    assert [problem in replies.problem for replies in found if replies.run is None] == (
        [] if problem is None else [True]
    )
