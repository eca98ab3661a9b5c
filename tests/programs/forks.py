"""Runs a program as a worker that the fork server has forked, and ends as the worker does.

    python forks.py MODULES PYTHON BOOTSTRAP script|module TARGET [ARGS]...

MODULES are what the server imports, separated by commas.
"""

import os
import resource
import select
import signal
import sys

from ddplaunch.process.fork_server import ForkServer
from ddplaunch.process.linux import become_subreaper
from ddplaunch.process.start import Stdio, handled_signals

modules, *argv = sys.argv[1:]
env = dict(os.environ)
env.pop("PYTHONPATH", None)
if "WORKERS_PYTHONPATH" in env:
    env["PYTHONPATH"] = env.pop("WORKERS_PYTHONPATH")
become_subreaper()
server = ForkServer(argv, env, filter(None, modules.split(",")), handled=handled_signals())
while not server.is_ready:
    select.select([server], [], [])
    server.read()
worker = server.fork(argv, env, Stdio(0, 1, 2))
server.close()
_, status = os.waitpid(worker.pid, 0)
if os.WIFSIGNALED(status):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
    os.kill(os.getpid(), os.WTERMSIG(status))
sys.exit(os.WEXITSTATUS(status))
