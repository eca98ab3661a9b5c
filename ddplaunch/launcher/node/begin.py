"""The agent (the process that supervises a node's workers) from its fork to its loop, and the process that writes its files.

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
from typing import TYPE_CHECKING, NoReturn

from ddplaunch.launcher.node import child
from ddplaunch.record.file_queue import PROGRESS, FileQueue, reply
from ddplaunch.system import exitcodes
from ddplaunch.system.errors import not_imported, own_imports
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.fork import fork
from ddplaunch.system.process.linux import (
    become_subreaper,
    detach,
    keep_freed_memory,
    memory_file,
    of_open_files,
    signal_at_end_of,
)

if TYPE_CHECKING:
    from ddplaunch.launcher.node.job import AgentJob
    from ddplaunch.reach.pipes import FrontPipes


def run(job: AgentJob, pipes: FrontPipes) -> int:
    """Be the agent: carry the job out and return its exit status. Runs in a process of its own, with signals still blocked.

    Raises:
        LaunchError: its modules cannot be imported, or it cannot prepare to meet the other nodes.
    """
    become_subreaper()
    files = start_writer()
    try:
        connect = job.link()  # by which the agent reaches the coordinator: from here on other nodes may reach this one
        with own_imports():
            from ddplaunch.launcher.node import agent  # before it is decided that the job begins
        if not child.decide_start(pipes):
            return exitcodes.BUG  # which nobody sees: the front has prevented the start, and ends this process
        _enable_garbage_collection()  # which was off for the start
        keep_freed_memory()
        return agent.Agent(Loop(), job, connect, files, pipes).run()
    finally:
        job.inputs.error_files.remove()  # with the folder that workers have written them to


def start_writer() -> FileQueue:
    """Fork the process that writes the files of the run; return the queue to that process. Without room, the queue drops all.

    A run that keeps no logs has such a process, too, which names the run's socket and removes the file of a file:// rendezvous.
    """
    progress = -1
    try:
        progress = memory_file("ddplaunch")  # where the writer notes how far it is
        os.pwrite(progress, bytes(PROGRESS), 0)  # nothing yet
        ours, its = socket.socketpair()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)  # the run's socket
        agent, pid = os.getpid(), fork()
    except OSError:  # no worker will find room either
        if progress >= 0:
            os.close(progress)
        return FileQueue()
    if pid == 0:
        _be_writer(agent, its, progress, listener)
    its.close()
    ours.setblocking(False)
    return FileQueue(ours, progress, pid, listener)


def _be_writer(agent: int, sock: socket.socket, progress: int, listener: socket.socket) -> NoReturn:
    """Be the process that writes files, a child of `agent` (its pid), until `sock` ends; a failure is its last reply there.

    `progress` is the file in memory where it notes how far it is, `listener` the run's socket, which it gives a name on the disk.
    """
    try:
        signal_at_end_of(agent, signal.SIGCONT)  # a writer that is stopped goes on, and sees the end of its socket
        # no signal but SIGKILL comes here from now on; these descriptors become 3, 4 and 5, and all others are closed
        detach(sock.fileno(), progress, listener.fileno())
        from ddplaunch.record import file_writer  # only that process needs it

        _enable_garbage_collection()
        file_writer.run(3, 4, 5)
    except ImportError as error:
        why_no_writer = not_imported(error).message
        os.write(3, reply(none=why_no_writer))
    except OSError as error:  # of `detach`: `sock` is still open
        why_no_writer = f"{error.strerror}{of_open_files(error.errno)}"
        sock.send(reply(none=why_no_writer))
    finally:
        os._exit(0)  # the agent sees the end of the socket


def _enable_garbage_collection() -> None:
    """Have Python collect garbage from here on, except for what is there: the start went without, but a job may run for weeks."""
    gc.freeze()
    gc.enable()
