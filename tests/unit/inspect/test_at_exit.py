"""What Python still does in a worker whose script has ended, by the dump of its threads."""

import pytest

from ddplaunch.record.seen.dump import parse_dump
from ddplaunch.record.seen.stack import exit_state

CWD = "/home/me"
LIBRARY = "/usr/lib/python3.11"
BOOTSTRAP = '  File "/opt/ddplaunch/worker/bootstrap.py", line 34 in <module>\n'


def dump(main: str, *others: str) -> str:
    threads = [*(f"Thread 0x1 (most recent call first):\n{frames}" for frames in others)]
    return "\n".join([*threads, f"Current thread 0x2 (most recent call first):\n{main}"])


UPLOAD = f'  File "{CWD}/train.py", line 3 in upload\n  File "{LIBRARY}/threading.py", line 9 in run\n'
MONITOR = f'  File "{LIBRARY}/threading.py", line 331 in wait\n  File "{LIBRARY}/tqdm/_monitor.py", line 6 in run\n'
SHUTDOWN = f'  File "{LIBRARY}/threading.py", line 1590 in _shutdown\n'
JOINS = f'  File "{LIBRARY}/threading.py", line 9 in join\n'
POOL = f'{JOINS}  File "{LIBRARY}/concurrent/futures/thread.py", line 31 in _python_exit\n'
CHILDREN = (
    f'  File "{LIBRARY}/multiprocessing/popen_fork.py", line 27 in poll\n'
    f'  File "{LIBRARY}/multiprocessing/util.py", line 360 in _exit_function\n'
)
SAVES = f'  File "{CWD}/save.py", line 9 in flush\n'
STEP = f'  File "{CWD}/train.py", line 88 in step\n  File "{CWD}/train.py", line 120 in <module>\n{BOOTSTRAP}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (dump(SHUTDOWN, UPLOAD), "its script has ended, and Python waits for a thread: train.py:3 in upload"),
        (dump(SHUTDOWN, MONITOR, UPLOAD), "its script has ended, and Python waits for a thread: train.py:3 in upload"),
        (dump(SHUTDOWN, MONITOR), "its script has ended, and Python waits for a thread: threading.py:331 in wait"),
        (
            dump(POOL + SHUTDOWN, UPLOAD, UPLOAD.replace("line 3", "line 4")),
            "its script has ended, and Python waits for threads: train.py:3 in upload, train.py:4 in upload",
        ),
        (dump(SHUTDOWN), "its script has ended, and Python waits for a thread"),
        (dump(CHILDREN, UPLOAD), "its script has ended, and Python waits for its child processes"),
        (dump(SAVES), "its script has ended, and Python runs a function that was registered for its exit: save.py:9 in flush"),
        (dump(STEP, UPLOAD), ""),
        (dump(""), ""),
        (dump(SAVES * 100), ""),
        ("", ""),
    ],
    ids=["a thread", "beside one of a library", "one of a library", "two, of a pool", "one without a frame", "children",
         "atexit", "the script runs", "no frame", "too deep to know", "no dump"],
)  # fmt: skip
def test_what_python_waits_for_is_told_once_the_script_has_ended(text: str, said: str) -> None:
    assert exit_state(parse_dump(text), CWD) == said
