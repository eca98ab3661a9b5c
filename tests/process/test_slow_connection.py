"""The output of a host does not pile up on its way: what the agent says to the coordinator would come behind it."""

import os
import sys
from subprocess import PIPE, Popen

from ddplaunch.reach.pipes import MESSAGE
from ddplaunch.reach.protocol import (
    AHEAD,
    FROM_HOST,
    HEARTBEAT,
    OUTPUT,
    TAKEN,
    TAKEN_STEP,
    GreetingDecoder,
    PipeDecoder,
    pack,
)
from tests.conftest import until

LOUD = """
import sys
from ddplaunch.launcher.node import child
from ddplaunch.launcher.elsewhere.host_front import HostFront
from ddplaunch.reach.pipes import STDOUT
from ddplaunch.reach.protocol import InputPipe, OutputPipe, greeting

def agent(pipes):
    child.decide_start(pipes)
    pipes.output[1].setblocking(True)
    while True:
        pipes.output[1].send(STDOUT + b"x" * 4000)

sys.exit(HostFront(InputPipe(0), OutputPipe(1, greeting()), 60.0, "host").serve(agent, (), ()))
"""


class Reader:
    """What comes from a host, as the command reads it."""

    def __init__(self, front: Popen[bytes]) -> None:
        assert front.stdout is not None
        self._fd = front.stdout.fileno()
        greeting = GreetingDecoder()
        while greeting.feed(os.read(self._fd, 1 << 16)) is None:
            pass
        self._frames = PipeDecoder(FROM_HOST)
        self._frames.feed(greeting.rest)
        self.output = 0  # bytes

    def next(self) -> bytes:
        """Return the tag of the next frame."""
        while (frame := self._frames.take()) is None:
            data = os.read(self._fd, 1 << 16)
            assert data
            self._frames.feed(data)
        tag, content = frame
        self.output += len(content) * (tag in OUTPUT)
        return tag


def test_a_host_sends_little_output_before_it_hears_that_the_last_was_taken():
    with Popen([sys.executable, "-c", LOUD], stdin=PIPE, stdout=PIPE, bufsize=0) as front:
        try:
            assert front.stdin is not None
            reader = Reader(front)
            for taken in (0, TAKEN_STEP):
                front.stdin.write(pack(TAKEN, b"") if taken else b"")
                while reader.output < AHEAD + taken:
                    reader.next()
                for _ in range(20):
                    front.stdin.write(pack(HEARTBEAT, b""))  # which is answered when no output waits
                    while reader.next() != HEARTBEAT:
                        assert reader.output <= AHEAD + taken + MESSAGE
            front.stdin.close()
            until(lambda: front.poll() is not None, "the end of the front")
        finally:
            front.kill()
