"""The signals that announce the end: heard beside the program's own handlers, and harmless to its children."""

import subprocess
import sys
from signal import SIGINT, SIGTERM, SIGUSR1, SIGUSR2

import pytest

from ddplaunch.worker.notice import signals


def said(lines: str) -> list[str]:
    """Run a script that uses the module, and give the lines that it prints."""
    program = f"import os, signal, sys, threading\nfrom ddplaunch.worker import notice\nme = os.getpid()\n{lines}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.splitlines()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_is_a_notice_and_ends_nothing(name):
    assert said(f"""
notice.install_handlers()
print(notice.received())
os.kill(me, signal.{name})
print(notice.received())
""") == ["False", "True"]


def test_a_handler_that_the_program_had_installed_is_still_called():
    assert said("""
signal.signal(signal.SIGTERM, lambda signum, frame: print("mine", signum, frame is not None))
notice.install_handlers()
notice.install_handlers()
os.kill(me, signal.SIGTERM)
print(notice.received())
""") == ["mine 15 True", "True"]


def test_a_handler_that_is_taken_away_again_after_ours_came_leaves_ours():
    assert said("""
before = signal.signal(signal.SIGTERM, lambda signum, frame: print("not mine"))
notice.install_handlers()
signal.signal(signal.SIGTERM, before)
notice.install_handlers()
os.kill(me, signal.SIGTERM)
print(notice.received())
""") == ["True"]


def test_a_handler_that_comes_before_ours_and_again_after_it_and_calls_it_hears_of_the_notice_once():
    assert said("""
ours = None
def theirs(signum, frame):
    print("theirs")
    callable(ours) and ours(signum, frame)
signal.signal(signal.SIGTERM, theirs)
notice.install_handlers()
ours = signal.signal(signal.SIGTERM, theirs)
notice.install_handlers()
os.kill(me, signal.SIGTERM)
print(notice.received())
""") == ["theirs", "True"]


def test_a_signal_for_which_the_program_has_faulthandler_write_stacks_is_a_notice_too():
    assert (
        said("""
import faulthandler
os.dup2(1, 2)
faulthandler.register(signal.SIGUSR1)
notice.install_handlers()
os.kill(me, signal.SIGUSR1)
print(notice.received(), flush=True)
""")[-1]
        == "True"
    )


def test_ctrl_c_as_a_notice_is_no_interrupt():
    assert said("""
os.environ["DDPLAUNCH_NOTICE_SIGNALS"] = "INT"
notice.install_handlers()
os.kill(me, signal.SIGINT)
print(notice.received())
""") == ["True"]


def test_another_thread_cannot_begin_to_listen():
    assert said("""
def begin():
    try:
        notice.install_handlers()
    except RuntimeError as error:
        print(error)
threading.Thread(target=begin).start()
""") == ["the first should_stop() installs signal handlers: call it once in the main thread before"]


@pytest.mark.parametrize("begin", ["notice.spare_children()", "notice.install_handlers()"])
def test_a_forked_child_outlives_a_notice_and_ends_by_sigterm(begin):
    """As DataLoader's processes: multiprocessing ends them by SIGTERM."""
    assert said(f"""
{begin}
child = os.fork()
if not child:
    os.kill(os.getpid(), signal.SIGUSR1)
    print(notice.received(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
print(os.WTERMSIG(os.waitpid(child, 0)[1]), notice.received())
""") == ["False", "15 False"]


def test_a_child_keeps_the_handlers_of_the_program():
    assert said("""
signal.signal(signal.SIGUSR1, lambda *_: print("mine", flush=True))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
notice.install_handlers()
if child := os.fork():
    os.waitpid(child, 0)
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGTERM)
print(notice.received())
""") == ["mine", "False", "mine", "True"]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("", [SIGTERM, SIGUSR1]), ("USR1", [SIGTERM, SIGUSR1]), ("SIGUSR2, int,", [SIGTERM, SIGUSR1, SIGUSR2, SIGINT])],
)
def test_the_variable_names_more_signals(variable, expected):
    assert signals({"DDPLAUNCH_NOTICE_SIGNALS": variable}) == expected


@pytest.mark.parametrize("word", ["USR7", "KILL", "SIGSTOP", "10", "SIG_BLOCK"])
def test_what_is_no_signal_is_an_error(word):
    with pytest.raises(
        ValueError, match=f"DDPLAUNCH_NOTICE_SIGNALS is 'USR1,{word}', and '{word}' is no signal that can"
    ):
        signals({"DDPLAUNCH_NOTICE_SIGNALS": f"USR1,{word}"})
