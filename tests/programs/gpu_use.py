"""What the GPUs do that are found here, as the child of an agent answers: two questions, then the end."""

import marshal
import os
import socket
import threading

from ddplaunch.plan.devices import nvidia
from ddplaunch.plan.devices.node import probe

ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
devices = probe(os.environ, root="/nonexistent").devices
child = threading.Thread(target=nvidia.serve_use, args=(theirs.detach(), devices))
child.start()
answers = []
for _ in range(2):
    try:
        ours.send(b"?")
        answers.append(marshal.loads(ours.recv(1 << 16)))
    except (OSError, EOFError):
        answers.append(None)
ours.close()
child.join()
print(answers)
