"""The agent from its fork to its loop: what it knows by then, and what is made ready beside it.

The command imports only what it needs itself to find out all that an error could tell. What the agent alone needs is imported
in the agent: the command stays small, a fork of it is quick, and no page of those modules is copied. The process that writes
files is forked before that, and does its own imports meanwhile. A signal that asks for the end before all is imported has the
front kill the agent, see `child.claim`: nothing has been started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch import exitcodes
from ddplaunch.agent import child
from ddplaunch.errors import own_imports
from ddplaunch.process.linux import become_subreaper
from ddplaunch.runlog.file_queue import start_writer

if TYPE_CHECKING:
    from ddplaunch.agent.job import AgentJob
    from ddplaunch.agent.pipes import FrontPipes


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
            from ddplaunch.agent import agent  # from the claim on all is here
        if not child.claim(pipes):
            return exitcodes.BUG  # which nobody sees: the front ends this process
        return agent.run(job, connect, files, pipes)
    finally:
        job.inputs.error_files.remove()
