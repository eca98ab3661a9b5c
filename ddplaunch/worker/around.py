"""What a worker does before its program runs, and once an exception has ended that. Runs nothing of the program itself."""

import os
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    Load = Callable[[str], dict[str, Any]]  # gives the names that a file beside this one defines


class Around:
    """One worker's; `names` are those of the `__main__` that the interpreter made for the bootstrap."""

    def __init__(self, load: "Load", folder: str, names: "Mapping[str, object]") -> None:
        """Make this process ready for the program: `run` and `arguments` are the call that runs it."""
        self._load = load
        self._folder = folder
        self._failed = False
        if served := os.environ.pop("DDPLAUNCH_FORK_SERVER", ""):
            number, *modules = served.split(",")
            serve = load("fork_server")["serve"]  # which returns in each worker
            sys.argv[1:] = serve(load, int(number), modules, sys.argv[1:])
        elif kept := os.environ.pop("DDPLAUNCH_WARM", ""):
            sys.argv[1:] = load("warm")["serve"](load, *kept.split(","))  # so does this

        self._error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
        pinned = os.environ.pop("DDPLAUNCH_PIN_DEVICE", "")  # this process's own, not its children's
        stacks = os.environ.pop("DDPLAUNCH_STACKS", "")
        self._recorder = os.environ.pop("DDPLAUNCH_RECORDER", "")
        self._pipe = os.environ.pop("DDPLAUNCH_NOTIFY", "")
        debugger = os.environ.pop("DDPLAUNCH_DEBUGGER", ",,").split(",")
        self._debugger, attach_signal, self._how_debugged, *waits = debugger
        sharing = os.environ.get("DDPLAUNCH_SHARING_STRATEGY", "")
        port = os.environ.get("MASTER_PORT", "")

        os.register_at_fork(after_in_child=self._forget)
        if stacks:
            numbers, of_stacks = list(map(int, stacks.split(","))), load("stacks")
            of_stacks["offer"](*numbers)
            if attach_signal:
                load("attach")["offer"](numbers[0], int(attach_signal), self._debugger, of_stacks, load)

        if pinned or sharing or port:
            settings = load("torch_settings")
            if pinned:
                settings["pin"](pinned)
            if sharing:
                settings["share"](sharing)
            if port:
                settings["when_imported"]("torch.distributed", self._extend)
        if waits:
            self._held = load("listen")["wait"](self._debugger, load("debugger"))
        self._program = load("program")
        self.run, self.arguments = self._program["prepare"](sys.argv[1], sys.argv[2], sys.argv[3:], names, self._record)

    def failed(self, error: BaseException) -> None:
        """Do what follows from the exception that has ended the program, and is raised again."""
        self._failed = not isinstance(error, SystemExit) or error.code not in (None, 0)
        self._program["hide_first_frame"](error)
        self._record(error)
        if self._how_debugged == "on-error":
            self._load("debugger")["post_mortem"](error, self._debugger)

    def _record(self, error: BaseException) -> None:
        """Write the error file, if there is one to write; never raises, so that the program ends as it would without us."""
        try:
            if self._error_file:
                _make_room_for_files()
                self._load("error_file")["record"](error, self._error_file)
                if os.path.exists(self._error_file):  # torch's @record may have written it
                    self._notify(b"r")
        except BaseException:  # noqa: BLE001, S110 - also what a signal handler raises: the program is ending already
            pass

    def _notify(self, what: bytes) -> None:
        """Have the agent look at once, by a pipe of its own; it may have ended, and another process may have its pid."""
        try:
            if stat.S_ISFIFO(os.stat(self._pipe).st_mode):
                pipe = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK)
                try:
                    os.write(pipe, what)
                finally:
                    os.close(pipe)
        except OSError:
            pass

    def _forget(self) -> None:
        """Leave the error file to the process that was started: a forked child's exception has not ended the worker."""
        self._error_file = self._how_debugged = ""

    def _extend(self, distributed: "Any") -> None:
        """Have the store at MASTER_PORT served as under torchrun, process groups end without a deadlock, collectives recorded."""
        load = self._load
        try:
            load("process_group")["destroy_at_exit"](distributed, lambda: self._failed)
            load("reducers")["outlived_by_groups"](distributed)
            server = os.path.join(self._folder, "store_server.py")
            load("store")["serve"](distributed, server, lambda: self._notify(b"s"))
            if self._how_debugged:
                load("timeouts")["raise_all"](distributed)
            if self._recorder:
                load("recorder")["switch_on"](distributed, self._recorder, lambda: self._notify(b"j"))
        except Exception:  # noqa: BLE001, S110 - not the torch that we know, or not our variables: leave it as it is
            pass


def _make_room_for_files() -> None:
    """Close stdin, which nobody will read any more, if the program has opened as many files as it may."""
    try:
        os.close(os.open("/", os.O_RDONLY))
    except OSError:
        os.close(0)
