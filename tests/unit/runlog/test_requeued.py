"""What is kept of a job that is requeued is found by its next start, and by no other job or program."""

import os
import time
from pathlib import Path

from ddplaunch.reach.slurm.job import REQUEUED_KEPT, Requeued, keep_requeued, read_requeued, requeued_file

FAR = Requeued(start=1, best_step=40, without_new_step=2)


def test_the_next_start_finds_what_was_kept_last(tmp_path: Path) -> None:
    path = requeued_file(str(tmp_path), "east/7", "train.py")
    assert read_requeued(path) is None
    keep_requeued(path, Requeued(start=1, best_step=3, without_new_step=1))
    keep_requeued(path, FAR)
    assert read_requeued(path) == FAR
    others = [("east/8", "train.py"), ("west/7", "train.py"), ("east/7", "eval.py")]
    assert [read_requeued(requeued_file(str(tmp_path), *other)) for other in others] == [None] * 3


def test_generations_count_in_a_row_only_if_the_last_start_has_left_them() -> None:
    """Slurm may requeue a job itself, and then nothing is kept of that start."""
    assert [FAR.count_at(start) for start in (1, 2, 3)] == [0, 2, 0]


def test_nothing_is_done_in_a_folder_that_is_a_link(tmp_path: Path) -> None:
    path = Path(requeued_file(str(tmp_path), "east/7", "train.py"))
    (tmp_path / "elsewhere").mkdir()
    path.parent.parent.mkdir()
    path.parent.symlink_to(tmp_path / "elsewhere")
    keep_requeued(str(path), FAR)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_what_ddplaunch_has_not_written_is_nothing(tmp_path: Path) -> None:
    path = Path(requeued_file(str(tmp_path), "east/7", "caf\udce9.py"))
    keep_requeued(str(path), FAR)
    path.rename(path.with_suffix(".old"))
    path.symlink_to(path.with_suffix(".old"))
    assert read_requeued(str(path)) is None
    path.unlink()
    path.write_text('{"best_step": "many"}')
    assert read_requeued(str(path)) is None
    path.unlink()
    os.mkfifo(path)
    assert read_requeued(str(path)) is None


def test_files_of_jobs_of_long_ago_are_removed(tmp_path: Path) -> None:
    old, new = (requeued_file(str(tmp_path), job, "train.py") for job in ("east/7", "east/8"))
    keep_requeued(old, FAR)
    os.utime(old, (0, time.time() - REQUEUED_KEPT - 1))
    keep_requeued(new, FAR)
    assert (read_requeued(old), read_requeued(new)) == (None, FAR)


def test_a_folder_that_cannot_be_made_holds_nothing_up(tmp_path: Path) -> None:
    (tmp_path / "ddplaunch").touch()
    path = requeued_file(str(tmp_path), "east/7", "train.py")
    keep_requeued(path, FAR)
    assert read_requeued(path) is None
