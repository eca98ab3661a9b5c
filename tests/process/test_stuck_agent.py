"""An agent that does not run, as if it were stopped, in uninterruptible sleep or in a loop: the job ends all the same."""

import os
import select
import signal
import sys
import time
from subprocess import DEVNULL, PIPE, Popen, run

import psutil
import pytest

from tests.conftest import PATIENCE, until
from tests.process.terminal import agent_of, child, held, stat


def stop_process(pid: int) -> None:
    """Stop a process, and wait until it is."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: stat(pid)[0] == "T", "the process to stop")


def test_a_stop_signal_says_that_the_agent_does_not_run_and_a_sigquit_ends_everything_without_it(job, program):
    said = job.home / "err"
    options = ("--nproc-per-node", 2, "--heartbeat-timeout", "1m")
    with open(said, "w") as err:
        process = job.start(*options, program("behave"), "all=default", stderr=err)
    job.signs("ready", 2)
    agent = agent_of(process.pid)
    stop_process(agent)
    process.send_signal(signal.SIGINT)
    silent = f"ddplaunch: the agent (pid {agent}) does not respond (it is stopped, as by SIGSTOP). "
    until(
        lambda: f"{silent}Without an answer for 1 min 30 s it is killed" in said.read_text(), "a word about the agent"
    )
    process.send_signal(signal.SIGQUIT)
    job.wait().expect(130)
    assert f"ddplaunch: the agent (pid {agent}) did not respond and was killed, with the workers\n" in said.read_text()


SILENT = ("--heartbeat-timeout", "1s")


def test_an_agent_that_is_stopped_is_killed_with_its_workers(job):
    process = job.behave("all=stubborn", options=SILENT)
    agent = agent_of(process.pid)
    stop_process(agent)
    result = job.wait(30).expect(122)
    line = f"error: ddplaunch's agent (pid {agent}) did not respond for 1.5 s (it is stopped, as by SIGSTOP): killed, with its"
    assert line in result.err


def test_a_stopped_agent_that_was_to_stop_the_job_is_killed_and_the_status_is_that_of_the_signal(job):
    process = job.behave("all=stubborn", options=SILENT)
    stop_process(agent_of(process.pid))
    process.send_signal(signal.SIGTERM)
    job.wait(30).expect(143)


def test_a_front_that_is_stopped_is_killed_and_the_workers_end(job):
    process = job.behave("all=polite", options=SILENT, stdout=DEVNULL, stderr=DEVNULL)
    stop_process(process.pid)
    assert process.wait(30) == -signal.SIGKILL
    job.nothing_left(patience=PATIENCE)
    assert [job.got(rank) for rank in range(2)] == [["SIGTERM"]] * 2


def test_a_front_that_is_suspended_with_the_script_that_calls_it_is_left_alone(job):
    """As PBS, SGE and LSF do: they reach the session or the process group of the script."""
    job.command = ["sh", "-c", '"$@"; exit $?', "sh", *job.command]
    process = job.behave("all=polite", options=SILENT, start_new_session=True)
    os.killpg(process.pid, signal.SIGSTOP)
    time.sleep(4)  # nothing is to happen in this time
    os.killpg(process.pid, signal.SIGCONT)
    assert not job.events("front_lost")
    os.kill(child(process.pid), signal.SIGTERM)
    job.wait().expect(143)


def test_an_agent_that_a_debugger_holds_for_a_while_goes_on(job):
    process = job.behave("all=polite", options=SILENT)
    with held(agent_of(process.pid)):
        time.sleep(4)  # nothing is to happen in this time
    process.send_signal(signal.SIGTERM)
    job.wait().expect(143)


ASLEEP = """
import os, sys
from ddplaunch.launcher.node import child
from ddplaunch.reach.pipes import LOOP_ANSWERS, Replies

def agent(pipes):
    # until the child has opened its stdin, which it never has, its parent is in the sleep of vfork(2)
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)])

process = child.start(agent, ())
while process.state != "D":
    pass
reader, writer = os.pipe()
os.set_blocking(reader, False)
os.write(writer, LOOP_ANSWERS)
process.replies = Replies(reader)
watch = child.Watch(process, 10.0)
print(sum(iter(watch.look, False)), watch.silent)
process.kill()
process.reap()
"""


def test_an_agent_whose_disk_does_not_answer_has_minutes(tmp_path):
    """As the disk of a file server that starts again: the agent may have modules to import from there."""
    os.mkfifo(tmp_path / "fifo")
    done = run(
        [sys.executable, "-c", ASLEEP, tmp_path / "fifo"], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.stderr) == ("48 240.0\n", "")


def test_a_front_that_a_debugger_holds_is_left_alone(job):
    process = job.behave("all=polite", options=SILENT)
    with held(process.pid):
        time.sleep(3)  # nothing is to happen in this time
    assert not job.events("front_lost")
    process.send_signal(signal.SIGTERM)
    job.wait().expect(143)


def agents_of(process: Popen[str]) -> list[int]:
    """The agents of simulated nodes, by node rank: each is the child of its host's front, which the dispatcher has started."""
    fronts = sorted(one.pid for one in psutil.Process(agent_of(process.pid)).children() if one.children())
    return [agent_of(front) for front in fronts]


@pytest.mark.parametrize(
    "which", ["the agent of node 0", "the agent of node 1", "the front of node 0", "the dispatcher"]
)
def test_whatever_is_stopped_of_a_job_that_is_simulated_the_command_ends(job, program, which):
    args = ("--nnodes", 2, "--nproc-per-node", 1, "--simulate", "--heartbeat-timeout", "1s", "--grace-period", "5s")
    process = job.start(*args, program("behave"), "all=polite")
    job.signs("ready", 2)
    agents = agents_of(process)
    pid = {
        "the agent of node 0": agents[0],
        "the agent of node 1": agents[1],
        "the front of node 0": psutil.Process(agents[0]).ppid(),
        "the dispatcher": agent_of(process.pid),
    }[which]
    stop_process(pid)
    assert job.wait(60).status == 122
    job.nothing_left(PATIENCE)


def test_the_second_stop_signal_leaves_an_agent_that_runs_to_do_it(job):
    process = job.behave("all=stubborn")
    process.send_signal(signal.SIGINT)
    until(lambda: job.events("stop_sent"), "the stop")
    process.send_signal(signal.SIGQUIT)
    result = job.wait().expect(130)
    assert "respond" not in result.err
    assert job.events("kill_sent")


@pytest.mark.parametrize("how", ["stopped", "held"])
def test_a_killed_command_needs_no_agent_that_runs(job, how):
    process = job.behave("all=default", stdout=DEVNULL, stderr=DEVNULL)
    agent = agent_of(process.pid)
    if how == "stopped":
        os.kill(agent, signal.SIGSTOP)
        until(lambda: stat(agent)[0] == "T", "the agent to stop")
        process.kill()
    else:
        with held(agent):
            process.kill()
            process.wait()
    process.wait()
    job.nothing_left(patience=PATIENCE)


LOOPS = """
import os, signal
from ddplaunch.launcher.node import child
from ddplaunch.launcher.node.events import FrontWaits
from ddplaunch.launcher.node.signals import SignalSource
from ddplaunch.system.loop.loop import Loop

def agent(pipes):
    source = SignalSource(Loop(), pipes, stops=frozenset(), end_within=0.2)
    source.listen(())
    print(os.getpid(), flush=True)
    while True:
        pass

child.start(agent, ())
signal.pause()
"""


def test_an_agent_in_a_loop_of_its_own_ends_after_its_front():
    with Popen([sys.executable, "-c", LOOPS], stdout=PIPE, text=True) as front:
        try:
            assert front.stdout is not None
            pidfd = os.pidfd_open(int(front.stdout.readline()))
        finally:
            front.kill()
        ended = select.select([pidfd], [], [], 60)[0]
        os.close(pidfd)
        assert ended, "the agent is still there"


ASKED = """
import signal, sys, time
from ddplaunch.launcher.node import child, front
from ddplaunch.launcher.node.events import FrontWaits
from ddplaunch.launcher.node.signals import SignalSource
from ddplaunch.system.loop.loop import Loop
from ddplaunch.launcher.decide.node import SignalReceived

def agent(pipes):
    child.decide_start(pipes)
    received = []
    def take(event):
        if isinstance(event, SignalReceived):
            received.append(event.signum)
            print(event.signum, flush=True)
    loop = Loop()
    loop.handle = take
    source = SignalSource(loop, pipes, stops=frozenset({2, 15}), end_within=9)
    source.listen((2, 15))
    print("ready", flush=True)
    while len(received) < 2:
        loop.run_once()
    source.wait(3)  # longer than the front waits for a reply
    return 7

sys.exit(front.run(agent, (2, 15), {2, 15}))
"""


def ends_with_its_status(program: str) -> None:
    """Prove that two signals to stop reach this agent, and that it is not killed."""
    with Popen([sys.executable, "-c", program], stdout=PIPE, stderr=PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "2\n"
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (7, "15\n", "")


def test_the_front_asks_an_agent_that_runs_and_no_signal_of_its_own_reaches_the_workers():
    ends_with_its_status(ASKED)


SLOW = ASKED.replace(
    "print(event.signum, flush=True)",
    """print(event.signum, flush=True)
            busy = time.monotonic() + 3 * (2 - len(received))  # at the first, of which the front asks
            while time.monotonic() < busy:
                pass""",
)


def test_the_front_waits_for_an_agent_that_is_slow_since_it_answers():
    assert SLOW != ASKED
    ends_with_its_status(SLOW)


AT_THE_END = """
import signal
from ddplaunch.launcher.node import child
from ddplaunch.reach.pipes import GOES_ON, MAY_STOP, STOPPED
from ddplaunch.launcher.node.events import FrontWaits
from ddplaunch.launcher.node.signals import SignalSource
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process import clock

def agent(pipes):
    loop = Loop()
    source = SignalSource(loop, pipes, stops=frozenset(), end_within=9)
    loop.handle = lambda event: isinstance(event, FrontWaits) and source.let_front_stop(all_stopped=True)
    source.listen(())
    while True:
        loop.run_once()

process = child.start(agent, ())
pipes, replies = process.pipes, process.replies
for signum in (signal.SIGTSTP, signal.SIGCONT):
    replies.forget(STOPPED + GOES_ON)
    pipes.pass_on(signum)
    pipes.request(MAY_STOP)
    assert replies.wait(STOPPED + GOES_ON, clock.now() + 60)
    print(replies.has(STOPPED), replies.has(GOES_ON))
process.kill()
"""


def test_an_agent_that_only_hands_its_output_over_still_knows_whether_the_front_may_stop():
    done = run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("True False\nFalse True\n", "")


BOTH_AT_ONCE = """
import os, signal
from ddplaunch.reach.pipes import IS_RUNNING, MAY_STOP, FrontPipes
from ddplaunch.launcher.node.events import FrontWaits
from ddplaunch.launcher.node.signals import SignalSource
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process import clock

pipes = FrontPipes.make()
loop = Loop()
loop.handle = lambda event: print(type(event).__name__)
SignalSource(loop, pipes, stops=frozenset(), end_within=9).listen(())
pipes.request(IS_RUNNING)  # so that the loop serves the pipe of requests first
pipes.pass_on(signal.SIGTSTP)
pipes.request(MAY_STOP)
loop.run_once()
print("- the front ends")
pipes.request(MAY_STOP)
os.close(pipes.signals[1])
loop.run_once()
print("- a request is left")
pipes.request(MAY_STOP)
loop.run_once()
"""


def test_signals_that_a_request_has_had_read_are_read_once():
    done = run([sys.executable, "-c", BOTH_AT_ONCE], capture_output=True, text=True, timeout=120, check=False)
    before, ended, after = "SignalReceived\nFrontWaits\n", "FrontLost\nFrontWaits\nFrontWaits\n", "FrontWaits\n"
    assert (done.stdout, done.stderr) == (f"{before}- the front ends\n{ended}- a request is left\n{after}", "")


CUT_OFF = """
import os, signal, sys
from ddplaunch.launcher.node import child
from ddplaunch.launcher.node.events import FrontWaits
from ddplaunch.launcher.node.signals import SignalSource
from ddplaunch.system.loop.loop import Loop
from ddplaunch.launcher.elsewhere.host_front import HostFront
from ddplaunch.reach.protocol import InputPipe, OutputPipe

def agent(pipes):
    child.decide_start(pipes)
    SignalSource(Loop(), pipes, stops=frozenset(), end_within=99).listen(())
    os.write(2, b"ready\\n")
    os.kill(os.getpid(), signal.SIGSTOP)

sys.exit(HostFront(InputPipe(0), OutputPipe(1), 60.0, "host").serve(agent, (), ()))
"""


def test_a_host_that_is_cut_off_waits_for_no_agent_that_does_not_run():
    with Popen([sys.executable, "-c", CUT_OFF], stdin=PIPE, stdout=DEVNULL, stderr=PIPE) as front:
        try:
            assert front.stderr is not None
            assert front.stderr.readline() == b"ready\n"
            agent = child(front.pid)
            until(lambda: stat(agent)[0] == "T", "the agent to stop")
            assert front.stdin is not None
            front.stdin.close()
            assert front.wait(30) == 122
        finally:
            front.kill()


LEFT_ASLEEP = """
import os, sys
from pathlib import Path
from ddplaunch.launcher.node import front

def agent(pipes):
    pid = os.fork()
    if pid == 0:
        # until the child has opened its stdin, which it never has, its parent is in the sleep of vfork(2)
        os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)])
        sum(range(5_000_000))
        open(sys.argv[2], "w").close()
        os._exit(0)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "D":
        pass
    return 0

sys.exit(front.run(agent, (), ()))
"""


def test_what_sleeps_when_the_agent_has_ended_is_waited_for_and_not_killed(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    ended = run(
        [sys.executable, "-c", LEFT_ASLEEP, tmp_path / "fifo", tmp_path / "done"], timeout=PATIENCE, check=False
    )
    assert ended.returncode == 0
    assert (tmp_path / "done").exists()


def test_output_that_is_not_read_does_not_hold_a_job_that_was_stopped_twice(job):
    """The agent ends before the front would give it up."""
    reader, writer = os.pipe()
    writes = "import os,signal; signal.signal(2, 1); os.write(1, bytes(300_000)); open('ready', 'w'); signal.pause()"
    process = job.start(
        "--nproc-per-node", 2, "--no-python", sys.executable, "-c", writes, stdout=writer, stderr=DEVNULL
    )
    os.close(writer)
    until((job.home / "ready").exists, "the output")
    process.send_signal(signal.SIGINT)
    until(lambda: job.events("stop_sent"), "the stop")
    process.send_signal(signal.SIGQUIT)
    assert process.wait(30) == 130
    os.close(reader)
