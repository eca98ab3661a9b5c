"""Folders are removed whatever a program has made of them, and nothing else is."""

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddplaunch.system.process.files import open_regular, remove, remove_within, replaced

DEEP = 3000


def nest(folder: Path, levels: int = DEEP) -> None:
    """Make folders in each other; each has a file, and two have one more folder beside the way down."""
    at = os.open(folder, os.O_RDONLY)
    for level in range(levels):
        os.close(os.open("file", os.O_CREAT, dir_fd=at))
        if level in (1, levels // 2):
            os.mkdir("beside", dir_fd=at)
            os.close(os.open("beside/file", os.O_CREAT, dir_fd=at))
        os.mkdir("d", dir_fd=at)
        inner = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inner
    os.close(at)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that is gone after the test: pytest's own removal does not get through all that lies here."""
    found = tmp_path / "folder"
    found.mkdir()
    yield found
    subprocess.run(["rm", "-rf", found], check=False)


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 5, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(os.listdir("/proc/self/fd")) == taken


def test_thousands_of_folders_in_each_other_are_removed_with_a_few_descriptors(folder: Path, few_descriptors) -> None:
    nest(folder)
    steps = sum(1 for _ in remove(str(folder)))
    assert not folder.exists()
    assert steps > 2 * DEEP  # small ones: other work can be done between them


def test_the_names_of_thousands_of_files_are_read_in_steps(folder: Path) -> None:
    at = os.open(folder, os.O_RDONLY)
    for number in range(5000):
        os.close(os.open(f"{number}", os.O_CREAT, dir_fd=at))
    os.close(at)
    removing = remove(str(folder))
    next(removing)
    assert len(os.listdir(folder)) == 5000
    assert sum(1 for _ in removing) == 4 + 5000
    assert not folder.exists()


def test_links_are_removed_and_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "others" / "inner").mkdir(parents=True)
    (tmp_path / "others" / "kept").touch()
    (folder / "link").symlink_to(tmp_path / "others")
    (folder / "to-file").symlink_to(tmp_path / "others" / "kept")
    (folder / "loop").symlink_to(folder)
    remove_within(str(folder), 60.0)
    assert not folder.exists()
    (tmp_path / "link").symlink_to(tmp_path / "others")
    remove_within(str(tmp_path / "link"), 60.0)
    assert sorted(path.name for path in (tmp_path / "others").iterdir()) == ["inner", "kept"]


def test_what_cannot_be_removed_ends_nothing(folder: Path, tmp_path: Path) -> None:
    remove_within(str(tmp_path / "not-there"), 60.0)
    (tmp_path / "file").touch()
    remove_within(str(tmp_path / "file"), 60.0)
    assert (tmp_path / "file").exists()


def test_a_folder_that_the_program_moves_away_takes_nothing_above_its_new_place_with_it(folder, tmp_path):
    (folder / "a").mkdir()
    (folder / "a" / "file").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    for _ in remove(str(folder)):
        if (folder / "a").exists() and not (folder / "a" / "file").exists():
            (folder / "a").rename(elsewhere / "a")
            (elsewhere / "d").mkdir()
    assert sorted(path.name for path in elsewhere.iterdir()) == ["a", "d", "kept"]


def test_the_time_is_bounded(folder: Path) -> None:
    for number in range(100):
        (folder / f"{number}").touch()
    remove_within(str(folder), -1.0)
    assert folder.exists()


def test_folders_that_a_program_has_closed_to_its_own_user_are_removed() -> None:
    """As root there would be nothing to see: it may do all."""
    with tempfile.TemporaryDirectory() as above:
        for name, mode in (("read-only", 0o500), ("closed", 0o000)):
            inner = Path(above, "folder", name)
            inner.mkdir(parents=True)
            (inner / "file").touch()
            inner.chmod(mode)
        if os.getuid() == 0:
            for path in (Path(above), *Path(above).rglob("*")):
                os.chown(path, 65534, 65534)
        if (pid := os.fork()) == 0:
            try:
                if os.getuid() == 0:
                    os.setgroups([])
                    os.setuid(65534)
                remove_within(f"{above}/folder", 60.0)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        assert os.listdir(above) == []


MOUNTS = """
mount -t tmpfs none "$1/mounted" && mount --bind "$2" "$1/a/bound" || exit 77
touch "$1/mounted/kept"
remove='import sys; from ddplaunch.system.process.files import remove_within; remove_within(sys.argv[1], 60)'
"$3" -c "$remove" "$1" && "$3" -c "$remove" "$1/a/bound"
cd "$1" && find . -type f
"""


def test_nothing_in_a_mount_is_removed_a_bind_mount_of_the_same_device_included(folder: Path, tmp_path: Path) -> None:
    others = tmp_path / "others"
    for inner in (folder / "mounted", folder / "a" / "bound", others):
        inner.mkdir(parents=True)
    for file in (folder / "a" / "file", others / "kept"):
        file.touch()
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", MOUNTS, "sh"]
    done = subprocess.run([*inside, folder, others, sys.executable], capture_output=True, text=True, check=False)
    if "unshare: " in done.stderr or done.returncode == 77:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    assert sorted(done.stdout.split()) == ["./a/bound/kept", "./mounted/kept"], done.stderr


def test_only_a_regular_file_is_opened_and_nothing_is_waited_for(tmp_path: Path) -> None:
    regular, pipe, link = tmp_path / "regular", tmp_path / "pipe", tmp_path / "link"
    regular.write_bytes(b"text")
    os.mkfifo(pipe)
    link.symlink_to(regular)
    with open_regular(str(regular)) as file:
        assert file.read() == b"text"
    for other in (pipe, link, tmp_path, Path("/dev/null")):
        with pytest.raises(OSError):  # noqa: PT011 - a folder, a pipe and a link are refused in words of their own
            open_regular(str(other))


def test_a_file_is_replaced_as_a_whole_keeps_its_mode_and_is_found_whole_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.write_text("old")
    path.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(path)
    with replaced(str(link)) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert (path.read_text(), path.stat().st_mode & 0o777, link.is_symlink()) == ("new", 0o640, True)
    with replaced(str(tmp_path / "private"), 0o600) as file:
        file.write(b"new")
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600


def test_after_an_error_the_old_file_is_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.write_text("old")
    with pytest.raises(TypeError), replaced(str(path)) as file:
        file.writelines([b"a part", "no bytes"])  # type: ignore[list-item]
    assert (os.listdir(tmp_path), path.read_text()) == (["page"], "old")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"), replaced(str(tmp_path / "pipe")):
        pass
    with pytest.raises(FileNotFoundError), replaced(str(tmp_path / "nowhere" / "page")):
        pass
