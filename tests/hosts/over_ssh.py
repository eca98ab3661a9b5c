"""One command for all hosts: where it is typed, and how the processes by which it spans them are found."""

from typing import Any

from tests.hosts import proc
from tests.hosts.bed import Bed
from tests.hosts.host import Command
from tests.hosts.job import HostsJob

NODES = ("node0", "node1", "node2")
LOGIN = "login"  # a host that is none of the job's
HOSTS = (*NODES, LOGIN)


def start(job: HostsJob, *args: object, nodes: str = ",".join(NODES), host: str = LOGIN, **popen: Any) -> Command:
    """Type the command on a host."""
    return job.start("--hosts", nodes, *args, host=host, **popen)


def front_and_loop(bed: Bed, host: str) -> tuple[int, int]:
    """The two processes of what was typed on a host, once it reaches its nodes; pids as they are outside, here as below.

    Each may have a child that asks something, or that is not an ssh yet.
    """
    typed = {process.pid: process for process in bed.processes(host) if "-m ddplaunch --hosts" in process.command}
    clients = {process.pid for process in bed.processes(host) if process.name == "ssh"}
    (loop,) = [pid for pid in typed if clients & set(proc.children(pid))]
    (front,) = [pid for pid in typed if loop in proc.children(pid)]
    return front, loop


def client(bed: Bed, host: str, node: str) -> int:
    """The ssh on a host that leads to a node."""
    (found,) = [
        process for process in bed.processes(host) if process.name == "ssh" and f" {node} exec" in process.command
    ]
    return found.pid


def relay_and_agent(bed: Bed, node: str) -> tuple[int, int]:
    """The two processes on a node above its workers; the third one that is there writes files."""
    found = [process for process in bed.processes(node) if "-m ddplaunch.launcher.start.host" in process.command]
    relay, agent, *_ = sorted(found, key=lambda process: process.inside)
    return relay.pid, agent.pid


def workers(bed: Bed, node: str, program: str = "behave.py") -> list[proc.Process]:
    """The workers of a program on a node."""
    return [process for process in bed.processes(node) if program in process.command]
