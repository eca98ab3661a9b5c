"""A debugger in Slurm: `srun --pty` gives the terminal to the first node, whose rank has it."""

import os
import pty

from pexpect import fdpexpect

from tests.conftest import PATIENCE, PROGRAMS
from tests.slurm.job import SlurmJob
from tests.slurm.started import one_cluster

__all__ = ["one_cluster"]


def test_a_rank_of_the_first_node_is_debugged_while_another_node_has_no_terminal(job: SlurmJob) -> None:
    ours, theirs = pty.openpty()
    words = ("--debug", 0, PROGRAMS / "debug_target.py", "breakpoint", 0, "done")
    nodes = ("--pty", "--nodes=2", "--ntasks-per-node=1")
    command = job.start_srun(*nodes, *job.argv(*words), stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    terminal = fdpexpect.fdspawn(ours, timeout=PATIENCE)
    terminal.expect_exact("(Pdb) ")
    terminal.send("p RANK, os.isatty(0)\n")
    terminal.expect_exact("(0, True)")
    terminal.send("c\n")
    terminal.expect_exact("done in rank 0")
    assert command.wait(PATIENCE) == 0
    os.close(ours)
    job.nothing_left(10)


def test_where_a_node_has_no_terminal_the_first_one_says_so_and_the_job_ends(job: SlurmJob) -> None:
    ours, theirs = pty.openpty()
    words = ("--debug-on-error", PROGRAMS / "behave.py")
    nodes = ("--pty", "--nodes=2", "--ntasks-per-node=1")
    command = job.start_srun(*nodes, *job.argv(*words), stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    terminal = fdpexpect.fdspawn(ours, timeout=PATIENCE)
    terminal.expect_exact("node 1 (node2) does not take part: --debug-on-error needs a terminal")
    assert command.wait(PATIENCE) == 121
    os.close(ours)
    job.nothing_left(10)
