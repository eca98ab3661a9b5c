"""Lets a debugger in while the program runs: a real-time signal has the main thread ask the agent for the client.

Until then it costs a handler. A program that takes the signal for itself keeps it. The agent reads from the mode of the file for
stacks whether a debugger can get in: others have no access once the handler is there, nor the group once it is not any more.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

OTHERS, GROUP = 0o006, 0o060


def offer(fd: int, signum: int, address: str, names: "dict[str, Any]", load: "Callable[[str], dict[str, Any]]") -> None:
    """Do that; `names` are those of stacks.py, of whose agent's file this is the descriptor."""
    own: Any = sys.modules["_signal"]
    worker = os.getpid()
    peer: Any = None  # who looks, or has looked last

    def asked(_signum: int, frame: "FrameType | None") -> None:
        nonlocal peer
        if os.getpid() != worker:
            return
        if peer is not None and peer.is_open:
            peer.leave_if_hung_up()
            return
        try:
            session = load("prompt")["meet"](address, load("debugger"))
        except Exception:  # noqa: BLE001 - such as files of another version: the program goes on
            return
        if session is not None:
            peer = session.peer
            session.open_at(frame)

    def forked() -> None:
        if peer is not None:
            peer.forget()

    def mark(bits: int) -> None:
        try:
            if os.getpid() == worker and os.readlink(f"/proc/self/fd/{fd}").startswith(names["NAME"]):
                os.fchmod(fd, os.fstat(fd).st_mode & 0o777 & ~bits)
        except OSError:
            pass

    try:
        if own.getsignal(signum) != 0:  # SIG_DFL: a .pth file or sitecustomize has it
            return
        own.signal(signum, asked)
        os.register_at_fork(after_in_child=forked)
    except Exception:  # noqa: BLE001 - the program does without it
        return
    mark(OTHERS)
    own.signal = names["noticed"](own.signal, signum, lambda: mark(OTHERS | GROUP))
