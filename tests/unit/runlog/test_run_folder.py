"""The folder of a run as the agent knows it, without the process that writes it."""

import gc
import os
import resource
import socket

from ddplaunch.launcher.node.begin import start_writer
from ddplaunch.record.file_queue import PROGRESS, FileQueue
from ddplaunch.record.run_folder import RunFolder


def test_a_folder_that_was_never_made_has_no_place():
    ours, its = socket.socketpair()
    ours.setblocking(False)
    shared = os.memfd_create("test")
    os.pwrite(shared, bytes(PROGRESS), 0)
    folder = RunFolder(FileQueue(ours, shared), "/runs", "run", runs=None, torchrun_layout=False)
    assert (folder.path, folder.is_settled) == ("/runs/run", False)
    its.close()
    assert folder.is_settled
    ended = "the process that writes the logs has ended, perhaps killed: output is shown, but no longer kept"
    assert (folder.path, folder.problem) == (None, ended)


def test_a_writer_for_which_there_is_no_room_leaves_no_descriptor():
    before = set(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.memfd_create("test")
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))  # room for one more
    try:
        files = start_writer()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not files.is_open
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_writer_collects_what_its_messages_leave(tmp_path):
    collects, test, threshold = tmp_path / "collects", os.getpid(), gc.get_threshold()
    gc.callbacks.append(lambda *_: os.getpid() != test and collects.touch())  # the writer has copies of this
    gc.set_threshold(1)
    gc.disable()  # as the start goes
    try:
        files = start_writer()
    finally:
        gc.enable()
        gc.set_threshold(*threshold)
        gc.callbacks.pop()
    pid = files.pid
    assert files.listener is not None
    files.listener.close()
    files.close()
    os.waitpid(pid, 0)
    assert collects.exists()
