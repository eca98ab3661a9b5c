"""A signal ends a command once that has cleaned up, whatever other signals come."""

import os
import signal
import subprocess
import sys

CLEANS_UP = """
import signal
from ddplaunch.system.process.command import after_cleanup
with after_cleanup():
    try:
        print("ready", flush=True)
        signal.pause()
    finally:
        print("cleaned up", flush=True)
print("goes on")
"""


def test_two_signals_at_once_end_it_by_the_first_and_without_a_word() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", CLEANS_UP], stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for signum in (signal.SIGSTOP, signal.SIGHUP, signal.SIGTERM, signal.SIGCONT):
            os.kill(process.pid, signum)
        assert process.communicate() == ("cleaned up\n", "")
    assert process.returncode == -signal.SIGHUP
