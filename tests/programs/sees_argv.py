"""A worker that looks for the value of its variable SECRET in the arguments of all processes, as `ps` shows them to everybody."""

import os
from pathlib import Path

from signs import RANK, put


def arguments(pid):
    try:
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" "))  # any bytes
    except OSError:  # it has ended
        return ""


shown = [arguments(pid) for pid in os.listdir("/proc") if pid.isdigit()]
put(f"seen-{RANK}", "\n".join([os.environ["SECRET"], *(one for one in shown if os.environ["SECRET"] in one)]))
