"""What a forked worker makes of the process that it finds itself in, seen in a fresh one."""

import subprocess
import sys

import pytest

from ddplaunch.worker.signals import STACKS_FILE

BECOMES = """
import os, resource, sys
from ddplaunch.worker.fork_server import become_worker

limit, number = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
read, write = os.pipe()
os.write(write, b"x")
release = number or os.dup(read)
if number:
    os.dup2(read, number)
content = b"\\0".join([b"", b"1", b"an argument", b"DDPLAUNCH_STACKS=200,59", b""])
stdio = [os.dup(0), os.dup(1), os.dup(2), os.memfd_create("ddplaunch-stacks")]
print(become_worker(os.getppid(), content, stdio, release))
try:
    print(os.readlink("/proc/self/fd/200").partition(" ")[0])
except FileNotFoundError:
    print("nothing")
"""


@pytest.mark.parametrize(
    ("limit", "release", "stacks"),
    [(1024, 0, STACKS_FILE), (1024, 200, STACKS_FILE), (150, 0, "nothing")],
    ids=["as ever", "where the pipe that it waits at has the number", "where the limit of open files is lower"],
)
def test_it_has_the_file_for_stacks_at_its_number_if_it_can(limit, release, stacks):
    command = [sys.executable, "-c", BECOMES, str(limit), str(release)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.stderr) == (f"['an argument']\n{stacks}\n", "")
