"""An agent that does not run, as if it were stopped, in uninterruptible sleep or in a loop: the job ends all the same."""

from __future__ import annotations

import os
import select
import signal
import sys
from subprocess import DEVNULL, PIPE, Popen

import pytest

from tests.conftest import until
from tests.process.terminal import child, held, stat


def test_the_second_stop_signal_ends_everything_without_the_agent(job, program):
    process = job.start("--nproc-per-node", 2, program("behave"), "all=default")
    job.signs("ready", 2)
    agent = child(process.pid)
    os.kill(agent, signal.SIGSTOP)
    until(lambda: stat(agent)[0] == "T", "the agent to stop")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    result = job.wait()
    assert result.status == 130
    assert f"ddplaunch: the agent (pid {agent}) does not respond: killing it and the workers\n" in result.err
    job.nothing_left()


def test_the_second_stop_signal_leaves_an_agent_that_runs_to_do_it(job, program):
    process = job.start("--nproc-per-node", 2, program("behave"), "all=stubborn")
    job.signs("ready", 2)
    process.send_signal(signal.SIGINT)
    until(lambda: job.events("stop_sent"), "the stop")
    process.send_signal(signal.SIGTERM)
    result = job.wait()
    assert result.status == 130
    assert "does not respond" not in result.err
    assert job.events("kill_sent")
    job.nothing_left()


@pytest.mark.parametrize("how", ["stopped", "held"])
def test_a_killed_command_needs_no_agent_that_runs(job, program, how):
    process = job.start("--nproc-per-node", 2, program("behave"), "all=default", stdout=DEVNULL, stderr=DEVNULL)
    job.signs("ready", 2)
    agent = child(process.pid)
    if how == "stopped":
        os.kill(agent, signal.SIGSTOP)
        until(lambda: stat(agent)[0] == "T", "the agent to stop")
        process.kill()
    else:
        with held(agent):
            process.kill()
            process.wait()
    process.wait()
    job.nothing_left(patience=20)


LOOPS = """
import selectors, signal
from ddplaunch.agent import child
from ddplaunch.agent.signals import SignalSource

def agent(pipes):
    source = SignalSource(
        selectors.DefaultSelector(), pipes, stops=frozenset(), feed=print, child_ended=print, front_lost=print, end_within=0.2
    )
    source.listen(())
    print("looping", flush=True)
    while True:
        pass

pid, _ = child.start(agent, ())
print(pid, flush=True)
signal.pause()
"""


def test_an_agent_in_a_loop_of_its_own_ends_after_its_front():
    with Popen([sys.executable, "-c", LOOPS], stdout=PIPE, text=True) as front:
        assert front.stdout is not None
        lines = {front.stdout.readline().strip(), front.stdout.readline().strip()}
        agent = int((lines - {"looping"}).pop())
        pidfd = os.pidfd_open(agent)
        front.kill()
        front.wait()
        with os.fdopen(pidfd, "rb", closefd=True):
            assert select.select([pidfd], [], [], 20)[0], "the agent is still there"
