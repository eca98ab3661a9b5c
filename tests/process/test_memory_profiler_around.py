"""`memray run --follow-fork` around the command records no process that we fork: these close descriptors that it would use."""

import subprocess
import sys

# memray as far as it matters here: a tracker to which nothing leads but the frame of its `with`
PROGRAM = """
import os, sys, types

command = os.getpid()

class Tracker:
    def __enter__(self):
        self.times_left = 0
    def __exit__(self, *error):
        self.times_left += 1
        os.write(1, f"{'command' if os.getpid() == command else 'forked'} {self.times_left}\\n".encode())

memray = sys.modules["memray"] = types.ModuleType("memray")
memray.Tracker = Tracker
from ddplaunch.system.process.fork import fork

with Tracker():
    if pid := fork():
        os.waitpid(pid, 0)
    else:
        if pid := fork():  # as an agent forks
            os.waitpid(pid, 0)
        os._exit(0)
"""


def test_a_forked_process_leaves_the_profiler_once_and_the_command_keeps_it():
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["forked 1", "command 1"]
