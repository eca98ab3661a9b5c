"""The command with sockets in a folder of its own, and with as much patience as is said: `keeping.py FOLDER SECONDS ...`.

What other runs on this machine keep warm is out of its reach, and it takes no way out that is meant for a busy machine.
"""

import sys

from ddplaunch.__main__ import main
from ddplaunch.launcher.workers import warm
from ddplaunch.record import run_socket

if __name__ == "__main__":
    _, folder, seconds, *arguments = sys.argv
    run_socket.runtime_folder = lambda uid: folder
    warm.ANSWER_WITHIN = warm.LOCK_TIMEOUT = float(seconds)
    sys.argv[1:] = arguments
    main()
