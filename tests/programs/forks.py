"""Runs programs as workers that one fork server has forked, as their agent would: forks.py [MODULE]...

The server imports these modules. Stdin is a connection to `Forks`: each request is arguments, variables, and variables that the
server does not have, as JSON, with the descriptors that are to be 0, 1 and 2; the answer is how it ended.
"""

import json
import os
import select
import socket
import sys

from ddplaunch.launcher.workers.servers import Fork, ForkServer
from ddplaunch.system.process.child import Stdio, handled_signals
from ddplaunch.system.process.linux import become_subreaper

become_subreaper()
requests = socket.socket(fileno=0)
server = None
while True:
    request, stdio, _, _ = socket.recv_fds(requests, 1 << 20, 3)
    if not request:
        break
    argv, env, own = json.loads(request)
    for fd in stdio:
        os.set_inheritable(fd, False)  # the server keeps none of them open
    if server is None:
        server = ForkServer(argv, env, sys.argv[1:], handled=handled_signals())
        while not server.is_ready:
            select.select([server], [], [])
            server.read()
    [worker] = server.fork([Fork(argv, {**env, **own}, Stdio(*stdio))])
    for fd in stdio:
        os.close(fd)
    _, status = os.waitpid(worker.pid, 0)
    worker.abandon()
    requests.send(str(os.waitstatus_to_exitcode(status)).encode())
if server is not None:
    server.close()
