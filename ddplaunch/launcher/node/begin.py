"""The agent from its fork to its loop: what it knows by then, and what is made ready beside it.

The command imports only what it needs itself to find out all that an error could tell. What the agent alone needs is imported
in the agent: the command stays small, a fork of it is quick, and no page of those modules is copied. The process that writes
files is forked before that, and does its own imports meanwhile. A signal that asks for the end before all is imported has the
front kill the agent, see `child.decide_start`: nothing has been started.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
from typing import TYPE_CHECKING

from ddplaunch.launcher.node import child
from ddplaunch.record.file_queue import PROGRESS, FileQueue, reply
from ddplaunch.system import exitcodes
from ddplaunch.system.errors import not_imported, own_imports
from ddplaunch.system.process.fork import fork
from ddplaunch.system.process.linux import become_subreaper, detach, memory_file, of_open_files, signal_at_end_of

if TYPE_CHECKING:
    from ddplaunch.launcher.node.job import AgentJob
    from ddplaunch.reach.pipes import FrontPipes


def run(job: AgentJob, pipes: FrontPipes) -> int:
    """Carry the job out and give its exit status. Runs in a process of its own, in which signals are still blocked.

    Raises:
        LaunchError: its modules cannot be imported, or it cannot prepare to meet the others.
    """
    become_subreaper()
    files = start_writer()
    try:
        connect = job.link()
        with own_imports():
            from ddplaunch.launcher.node import agent  # from the claim on all is here
        if not child.decide_start(pipes):
            return exitcodes.BUG  # which nobody sees: the front ends this process
        return agent.run(job, connect, files, pipes)
    finally:
        job.inputs.error_files.remove()


def start_writer() -> FileQueue:
    """Fork the process that writes the files of the run; return the queue to that process. Without room, the queue drops all.

    A run that keeps nothing has one, too: it has a socket, and its file:// rendezvous leaves something to be removed.
    """
    shared = -1
    try:
        shared = memory_file("ddplaunch")
        os.pwrite(shared, bytes(PROGRESS), 0)
        ours, its = socket.socketpair()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        agent, pid = os.getpid(), fork()
    except OSError:  # no worker will find room either
        if shared >= 0:
            os.close(shared)
        return FileQueue()
    if pid == 0:
        try:
            signal_at_end_of(agent, signal.SIGCONT)  # one that was stopped is to see the end of the socket
            detach(its.fileno(), shared, listener.fileno())
            from ddplaunch.record import file_writer  # only that process needs it

            gc.freeze()  # the start went without a collector; a job of weeks needs one, here too
            gc.enable()
            file_writer.run(3, 4, 5)
        except ImportError as error:
            os.write(3, reply(none=not_imported(error).message))
        except OSError as error:  # it has not come so far as to be out of reach
            its.send(reply(none=f"{error.strerror}{of_open_files(error.errno)}"))
        finally:
            os._exit(0)  # the agent sees that it has ended
    its.close()
    ours.setblocking(False)
    return FileQueue(ours, shared, pid, listener)
