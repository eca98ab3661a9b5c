"""Runs a worker's program as plain `python` would, and writes down the exception that ends it.

    PYTHON /path/to/ddplaunch/worker/bootstrap.py script|module TARGET [ARGS]...

The program is the true `__main__`: module, arguments, import path, tracebacks, signals and exit status are as
without ddplaunch; one frame of ours stays below its first one. Standard library only, any CPython from 3.8 on. It refuses to
import ddplaunch, which the worker's interpreter need not have, and to leave a name of its own in `sys.modules`.
"""

# The interpreter compiles this file anew at each start, so the work is done in its siblings, whose code is cached. None of
# them has `from __future__ import annotations`: that imports a module which the program did not ask for.
import os
import sys

TYPE_CHECKING = False  # typing's own would be an import too
if TYPE_CHECKING:
    from typing import Any

folder = os.path.dirname(__file__)


def load(name: str) -> "dict[str, Any]":
    """Return the names that the file NAME.py beside this one defines."""
    path = os.path.join(folder, name + ".py")
    names: dict[str, Any] = {"__name__": name}
    loader = type(globals()["__loader__"])  # SourceFileLoader, without an import
    exec(loader(name, path).get_code(name), names)  # noqa: S102 - our own code
    return names


if served := os.environ.pop("DDPLAUNCH_FORK_SERVER", ""):
    number, *modules = served.split(",")
    sys.argv[1:] = load("fork_server")["serve"](load, int(number), modules, sys.argv[1:])  # returns in each worker
elif kept := os.environ.pop("DDPLAUNCH_WARM", ""):
    sys.argv[1:] = load("warm")["serve"](load, *kept.split(","))  # so does this

error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
pinned = os.environ.pop("DDPLAUNCH_PIN_DEVICE", "")  # this process's own, not its children's
stacks = os.environ.pop("DDPLAUNCH_STACKS", "")
recorder = os.environ.pop("DDPLAUNCH_RECORDER", "")
debugger, attach_signal, how_debugged, *waits = os.environ.pop("DDPLAUNCH_DEBUGGER", ",,").split(",")
sharing = os.environ.get("DDPLAUNCH_SHARING_STRATEGY", "")
port = os.environ.get("MASTER_PORT", "")
failed = False


def record(error: BaseException) -> None:
    """Write the error file, if there is one to write; never raises, so that the program ends as it would without us."""
    try:
        if error_file:
            make_room_for_files()
            load("error_file")["record"](error, error_file)
    except BaseException:  # noqa: BLE001, S110 - also what a signal handler raises: the program is ending already
        pass


def make_room_for_files() -> None:
    """Close stdin, which nobody will read any more, if the program has opened as many files as it may."""
    try:
        os.close(os.open("/", os.O_RDONLY))
    except OSError:
        os.close(0)


def forget() -> None:
    """Leave the error file to the process that was started: a forked child's exception has not ended the worker."""
    global error_file, how_debugged
    error_file = how_debugged = ""


def extend(distributed: "Any") -> None:
    """Have the store at MASTER_PORT served as under torchrun, process groups end without a deadlock, collectives recorded."""
    try:
        load("process_group")["destroy_at_exit"](distributed, lambda: failed)
        load("reducers")["outlived_by_groups"](distributed)
        load("store")["serve"](distributed, os.path.join(folder, "store_server.py"))
        if how_debugged:
            load("timeouts")["raise_all"](distributed)
        if recorder:
            load("recorder")["switch_on"](distributed, recorder)
    except Exception:  # noqa: BLE001, S110 - not the torch that we know, or not our variables: leave it as it is
        pass


os.register_at_fork(after_in_child=forget)
if stacks:
    numbers, names = list(map(int, stacks.split(","))), load("stacks")
    names["offer"](*numbers)
    if attach_signal:
        load("attach")["offer"](numbers[0], int(attach_signal), debugger, names, load)

if pinned or sharing or port:
    settings = load("torch_settings")
    if pinned:
        settings["pin"](pinned)
    if sharing:
        settings["share"](sharing)
    if port:
        settings["when_imported"]("torch.distributed", extend)
if waits:
    held = load("listen")["wait"](debugger, load("debugger"))
program = load("program")
run, arguments = program["prepare"](sys.argv[1], sys.argv[2], sys.argv[3:], globals(), record)
try:
    run(*globals().pop("arguments"))  # a reference of ours would keep the program's names from being finalised at exit
except BaseException as error:
    failed = not isinstance(error, SystemExit) or error.code not in (None, 0)
    program["hide_first_frame"](error)
    record(error)
    if how_debugged == "on-error":
        load("debugger")["post_mortem"](error, debugger)
    raise
