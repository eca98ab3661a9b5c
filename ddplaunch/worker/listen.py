"""Waits for a client of debugpy, such as VS Code, before the program begins, at a free port that it reports to the agent."""

import importlib
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any


def wait(address: str, names: "dict[str, Any]") -> "socket.socket | None":
    """Do that; `names` are those of debugger.py. Return the connection by which the agent knows that a debugger may hold us.

    Raises:
        ImportError: the interpreter has no debugpy.
    """
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # else it warns of Python's own frozen modules
    debugpy: Any = importlib.import_module("debugpy")
    _, port = debugpy.listen(("127.0.0.1", 0))
    agent: socket.socket | None = names["ask"](address, f"P{port}")
    debugpy.wait_for_client()
    return agent
