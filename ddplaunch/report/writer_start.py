"""Starts the process that writes the files of a run, and gives the queue to it."""

from __future__ import annotations

import gc
import os
import signal
import socket

from ddplaunch.errors import not_imported
from ddplaunch.output.file_messages import PROGRESS, reply
from ddplaunch.output.file_queue import FileQueue
from ddplaunch.process.linux import detach, memory_file, of_open_files, signal_at_end_of


def start_writer() -> FileQueue:
    """Fork it; give a queue that drops everything if there is no room for it.

    A run that keeps nothing has one, too: it has a socket, and its file:// rendezvous leaves something to be removed.
    """
    shared = -1
    try:
        shared = memory_file("ddplaunch")
        os.pwrite(shared, bytes(PROGRESS), 0)
        ours, its = socket.socketpair()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        agent, pid = os.getpid(), os.fork()
    except OSError:  # no worker will find room either
        if shared >= 0:
            os.close(shared)
        return FileQueue()
    if pid == 0:
        try:
            signal_at_end_of(agent, signal.SIGCONT)  # one that was stopped is to see the end of the socket
            detach(its.fileno(), shared, listener.fileno())
            from ddplaunch.report import file_writer  # only that process needs it

            gc.freeze()  # the start went without a collector; a job of weeks needs one, here too
            gc.enable()
            file_writer.run(3, 4, 5)
        except ImportError as error:
            os.write(3, reply(none=f"no logs are kept: {not_imported(error).message}"))
        except OSError as error:  # it has not come so far as to be out of reach
            its.send(reply(none=f"no logs are kept: {error.strerror}{of_open_files(error.errno)}"))
        finally:
            os._exit(0)  # the agent sees that it has ended
    its.close()
    ours.setblocking(False)
    return FileQueue(ours, shared, pid, listener)
