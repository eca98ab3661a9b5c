"""Runs a worker's program as plain `python` would, and writes down the exception that ends it.

    PYTHON /path/to/ddplaunch/worker/bootstrap.py script|module TARGET [ARGS]...

The program is the true `__main__`: module, arguments, import path, tracebacks, signals and exit status are as
without ddplaunch; one frame of ours stays below its first one. Standard library only, any CPython from 3.8 on. It refuses to
import ddplaunch, which the worker's interpreter need not have, and to leave a name of its own in `sys.modules`.
"""

# The interpreter compiles this file again at each start, so the work is done in its siblings, whose code is cached: before the
# program and after it, by `lifecycle`. Only the frame of this file lies below the program's. None of the siblings has
# `from __future__ import annotations`: that imports a module which the program did not ask for.
import os
import sys

TYPE_CHECKING = False  # typing's own would be an import too
if TYPE_CHECKING:
    from types import ModuleType

folder = os.path.dirname(__file__)


def load_sibling(name: str) -> "ModuleType":
    """Return the file NAME.py beside this one as a new module, which the program cannot find: it is not in `sys.modules`."""
    path = os.path.join(folder, name + ".py")
    importlib = sys.modules["_frozen_importlib_external"]  # there without an import; a debugger may have loaded us
    module = type(sys)(name)
    exec(importlib.SourceFileLoader(name, path).get_code(name), module.__dict__)  # noqa: S102 - our own code
    return module


lifecycle = load_sibling("lifecycle").Lifecycle(load_sibling, folder, globals())
try:
    # a reference of ours to the arguments would keep the program's names from being finalised at exit
    lifecycle.run(*lifecycle.__dict__.pop("arguments"))
except BaseException as error:
    lifecycle.failed(error)
    raise
lifecycle.finished()
