"""What faulthandler writes, in the forms that its versions have, and what a program may have written there instead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.record.seen.dump import MOST_FRAMES, MOST_THREADS, parse_crash, parse_dump, shortened
from ddplaunch.spec.outcome import Frame

OF_3_11 = """\
Thread 0x00007f1a5b7fe6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/threading.py", line 995 in _bootstrap

Current thread 0x00007f1a6a1f5740 (most recent call first):
  File "/home/me/train.py", line 88 in train_step
  File "/home/me/train.py", line 120 in <module>
  File "/opt/ddplaunch/worker/bootstrap.py", line 84 in <module>
"""

OF_3_14 = """\
Thread 0x00007f1a5b7fe6c0 [loader] (most recent call first):
  File "/usr/lib/python3.14/threading.py", line 324 in wait

Current thread 0x00007f1a6a1f5740 [python] (most recent call first):
  Garbage-collecting
  File "/home/me/train.py", line 88 in train_step

Current thread's C stack trace (most recent call first):
  Binary file "/usr/bin/python3.14", at _PyEval_EvalFrameDefault+0x1 [0x55d]
"""


HELD = """\
Current thread 0x00007f1a6a1f5740 (most recent call first):
  File "/opt/ddplaunch/worker/debugger.py", line 67 in readline
  File "/usr/lib/python3.11/cmd.py", line 129 in cmdloop
  File "/usr/lib/python3.11/pdb.py", line 390 in user_line
  File "/opt/ddplaunch/worker/signals.py", line 71 in _attach
  File "/home/me/train.py", line 88 in train_step
  File "/opt/ddplaunch/worker/bootstrap.py", line 84 in <module>
"""


def main(text: str) -> list[str]:
    (thread,) = (thread for thread in parse_dump(text) if thread.is_main)
    return [f"{frame.file}:{frame.line} {frame.function}" for frame in thread.frames]


@pytest.mark.parametrize("text", [OF_3_11, OF_3_14], ids=["3.11", "3.14"])
def test_the_thread_that_took_the_signal_is_the_main_one(text):
    assert main(text)[0] == "/home/me/train.py:88 train_step"
    assert len(parse_dump(text)) == 2


def test_nothing_of_ours_is_left_of_a_program_that_has_failed_and_is_looked_at():
    text = """\
Current thread 0x00007f1a6a1f5740 (most recent call first):
  File "/opt/ddplaunch/worker/debugger.py", line 67 in readline
  File "/opt/ddplaunch/worker/debugger.py", line 40 in post_mortem
  File "/opt/ddplaunch/worker/lifecycle.py", line 67 in failed
  File "/opt/ddplaunch/worker/bootstrap.py", line 39 in <module>
"""
    assert main(text) == []


def test_the_frame_of_the_bootstrap_is_left_out():
    assert main(OF_3_11)[-1] == "/home/me/train.py:120 <module>"


def test_threads_have_the_names_that_newer_versions_write():
    assert [thread.name for thread in parse_dump(OF_3_14)] == ["loader", "python"]


def test_without_a_current_thread_the_last_one_is_the_main_one():
    text = OF_3_11.replace("Current thread", "Thread")
    assert main(text)[0] == "/home/me/train.py:88 train_step"


def test_names_are_written_as_python_writes_them():
    head = "Current thread 0x1 (most recent call first):\n"
    assert main(head + r'  File "/home/caf\xe9/\u6f22\U0001f600.py", line 1 in f') == ["/home/café/漢😀.py:1 f"]
    assert main(head + '  File "/a"b.py", line ??? in f') == ['/a"b.py:0 f']
    assert main(head + "  File ???, line ??? in ???") == ["???:0 ???"]


def test_notes_in_place_of_frames_are_left_out():
    head = "Current thread 0x1 (most recent call first):\n"
    assert main(f"{head}  <no Python frame>\n") == []
    assert main(f"{head}  <Cannot show all threads while the GIL is disabled>\n  ...\n") == []


def test_a_rank_that_a_debugger_holds_is_where_its_program_is():
    assert main(HELD) == ["/home/me/train.py:88 train_step"]


def test_what_is_no_dump_has_no_threads():
    assert parse_dump("") == ()
    assert parse_dump('  File "a.py", line 1 in f\n' * 10) == ()


def test_a_dump_is_bounded_and_keeps_the_main_thread():
    thread = "Thread 0x1 (most recent call first):\n" + '  File "a.py", line 1 in f\n' * (MOST_FRAMES + 9)
    found = parse_dump(thread * (MOST_THREADS + 9) + OF_3_11)
    assert len(found) == MOST_THREADS
    assert all(len(thread.frames) <= MOST_FRAMES for thread in found)
    assert found[-1].is_main
    assert parse_dump(f'{OF_3_11}  File "{"a" * 9000}", line 1 in f\n') == parse_dump(OF_3_11)


@given(st.lists(st.sampled_from([*OF_3_14.splitlines(), '  File "', "x" * 600, r"\U00110000", "\0"]) | st.text()))
def test_no_text_is_too_strange(lines):
    for thread in parse_dump("\n".join(lines)):
        assert all(isinstance(frame, Frame) and len(frame.file) <= 512 for frame in thread.frames)


# --- of a process that a signal ended

OF_OTHERS = "".join(
    f"Thread 0x{number:x} (most recent call first):\n"
    + '  File "/usr/lib/python3.11/threading.py", line 324 in wait\n' * 90
    + "\n"
    for number in range(1, 9)
)
LONE = """\
Thread 0x00007f1a6a1f5740 (most recent call first):
  File "/home/me/train.py", line 88 in train_step
  File "/opt/ddplaunch/worker/bootstrap.py", line 84 in <module>

Extension modules: numpy (total: 1)
"""


def lines_of(frames: tuple[Frame, ...]) -> list[int]:
    return [frame.line for frame in frames]


@pytest.mark.parametrize("text", [OF_3_11, OF_3_14], ids=["3.11", "3.14"])
def test_the_thread_that_crashed_is_the_current_one(text):
    crash = parse_crash(f"noise\nFatal Python error: Segmentation fault\n\n{text}")
    assert lines_of(crash.current)[0] == 88


def test_of_a_crash_in_a_thread_that_python_does_not_know_the_main_thread_is_told():
    crash = parse_crash(f"Fatal Python error: Aborted\n\n{OF_OTHERS}{LONE}")
    assert (lines_of(crash.current), lines_of(crash.main)) == ([], [88])


def test_of_a_crash_in_a_thread_of_pythons_both_are_told():
    loader = 'Current thread 0x1 (most recent call first):\n  File "/home/me/load.py", line 3 in run\n\n'
    crash = parse_crash(f"Fatal Python error: Aborted\n\n{loader}{LONE}")
    assert (lines_of(crash.current), lines_of(crash.main)) == ([3], [88])


def test_of_a_list_that_was_cut_off_before_the_main_thread_no_thread_is_taken_for_it():
    crash = parse_crash(f"Fatal Python error: Aborted\n\n{OF_OTHERS}...\n")
    assert (crash.current, crash.main) == ((), ())


def test_a_dump_that_ended_no_process_is_no_crash():
    assert parse_crash(OF_3_11) == parse_crash("")


def test_however_long_the_stacks_of_others_are_what_was_said_before_a_crash_is_kept():
    said = "terminate called after throwing\n  what():  reason\n" + "frame #1: c10d::f() + 0x1 (0x1 in lib.so)\n" * 300
    text = f"{said}Fatal Python error: Aborted\n\n{OF_OTHERS}{LONE}"
    short = shortened(text, 4096)
    assert len(short) <= 4096
    assert short.startswith("terminate called after throwing\n  what():  reason\nFatal Python error: Aborted\n")
    assert parse_crash(short) == parse_crash(text)


@pytest.mark.parametrize("text", ["a line\n" * 2000, "x" * 9000, f"Fatal Python error: {'x' * 9000}", OF_OTHERS])
def test_the_end_of_any_other_text_is_kept_in_lines(text):
    assert len(shortened(text, 4096)) <= 4096
