"""What srun says of tasks that ended badly is found in its stderr, however that is cut, and nothing else is taken for it."""

import pytest

from ddplaunch.launcher.elsewhere.slurm.watcher import TaskEnd, TaskEnds, parse

STDERR = (
    b"slurmstepd: error: execve(): /opt/venv/bin/python: No such file or directory\n"
    b"srun: error: node2: task 1: Exited with exit code 2\n"
    b"a line of a program\n"
    b"srun: error: gpu[03-04]: tasks 2-3: Killed\n"
    b"srun: error: gpu07: task 6: Segmentation fault (core dumped)\n"
    b"srun: error: node3: task 2: Exited with exit"
)
ENDS = [
    TaskEnd(("node2",), "Exited with exit code 2"),
    TaskEnd(("gpu03", "gpu04"), "Killed"),
    TaskEnd(("gpu07",), "Segmentation fault (core dumped)"),
]


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_each_bad_end_is_found_however_the_stream_is_cut(size: int) -> None:
    ends = TaskEnds()
    assert [end for at in range(0, len(STDERR), size) for end in ends.feed(STDERR[at : at + size])] == ENDS


@pytest.mark.parametrize(
    "line",
    [
        b"srun: error: Unable to create step for job 5: Job/step already completing or completed",
        b"srun: node2: task 1: Completed",
        b"srun: error: node[2: task 1: Killed",
        b"srun: error: n\xf6de2: task 1: Killed",
        b"[node2] srun: error: node2: task 1: Killed",
        b"",
    ],
)
def test_other_lines_tell_of_no_end(line: bytes) -> None:
    assert parse(line) is None


def test_a_line_of_a_megabyte_is_not_kept() -> None:
    ends = TaskEnds()
    for _ in range(16):
        assert not list(ends.feed(b"x" * (1 << 16)))
    assert len(ends._line) <= 1 << 16
    assert list(ends.feed(b"\nsrun: error: node2: task 1: Killed\n")) == [TaskEnd(("node2",), "Killed")]
