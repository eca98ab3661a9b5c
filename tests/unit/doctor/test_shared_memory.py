"""What is said of /dev/shm, and which files there count as left by a program."""

import mmap
import os
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from ddplaunch.tools.doctor import shared_memory
from ddplaunch.tools.doctor.shared_memory import Segment, SharedMemory, judge
from tests.verdicts import found

GIB, MIB = 1 << 30, 1 << 20
SHM = SharedMemory(size=24 * GIB, free=20 * GIB)
LEFT = tuple(Segment(path=f"/dev/shm/torch_{pid} x", size=2 * GIB, age=7200.0) for pid in (11, 12))


@pytest.mark.parametrize(
    ("shm", "finding"),
    [
        (SHM, None),
        (SharedMemory(size=0, free=0, problem="no such file or directory"), ("broken", "/dev/shm cannot be used")),
        (SharedMemory(size=64 * MIB, free=60 * MIB), ("slow", "/dev/shm has 64 MiB only, and 60 MiB of them are free")),
        (replace(SHM, free=MIB), ("broken", "/dev/shm is full: 1 MiB of 24 GiB are free")),
        (replace(SHM, unused=LEFT[:1]), ("note", "2 GiB of /dev/shm belong to files of yours that a program has left")),
        (replace(SHM, unused=(replace(LEFT[0], size=4096),)), None),
        (
            replace(SHM, unused=(replace(LEFT[0], size=4096, is_named_by_program=True),)),
            ("note", "1 name in /dev/shm may be left by a program, which cannot make them again (FileExistsError)"),
        ),
    ],
)
def test_its_size_its_room_and_its_content_are_judged(shm, finding):
    assert found(judge(shm)) == ([finding] if finding else [])


def test_files_that_are_left_come_with_the_line_that_removes_exactly_them():
    (finding,) = judge(replace(SHM, unused=LEFT, sees_all_processes=False)).findings
    assert finding.hint == "`rm '/dev/shm/torch_11 x' '/dev/shm/torch_12 x'`"
    assert "no process of this container has them open, and the latest was written 2 h ago" in finding.evidence


def test_a_file_that_is_mapped_or_open_is_in_use_and_one_of_no_process_is_not(tmp_path: Path):
    names = [f"torch_{kind}" for kind in ("mapped", "open", "left", "young")] + ["of_another_program"]
    for name in names:
        (tmp_path / name).write_bytes(bytes(8192))
        old = time.time() - 3600
        os.utime(tmp_path / name, (old, old))
    with open(tmp_path / "torch_mapped", "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 8192)
    with mapped, open(tmp_path / "torch_open", "rb"):
        used = set(shared_memory._in_use(f"{tmp_path}/"))
    assert used == {f"{tmp_path}/torch_mapped", f"{tmp_path}/torch_open"}
    # the change of an inode cannot be set back: all files are young
    assert list(shared_memory._left_by_user(str(tmp_path))) == []


def test_names_of_training_count_and_what_is_made_as_shared_memory_is_and_no_others(tmp_path: Path):
    for name in ("torch_1_2_3", "nccl-Ab12", "sem.mp-x", "notes.txt", "my_cache"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "my_cache").chmod(0o600)
    (tmp_path / "torch_folder").mkdir()
    (tmp_path / "torch_link").symlink_to(tmp_path / "notes.txt")
    found = {
        os.path.basename(one.path): one.is_named_by_program for one in shared_memory._left_by_user(str(tmp_path), -1.0)
    }
    assert found == {"torch_1_2_3": False, "nccl-Ab12": False, "sem.mp-x": False, "my_cache": True}
