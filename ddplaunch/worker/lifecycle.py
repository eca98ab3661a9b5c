"""What a worker does before its program runs, and once an exception has ended that. Runs nothing of the program itself."""

import os
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    Load = Callable[[str], dict[str, Any]]  # returns the names that a file beside this one defines


class Lifecycle:
    """One worker, from the start of its interpreter to the exception that ends its program."""

    def __init__(self, load: "Load", folder: str, names: "Mapping[str, object]") -> None:
        """Make this process ready for the program: `run(*arguments)` is the call that runs it.

        In a server that forks workers, this returns in each of the workers and never in the server. `names` are those of the
        `__main__` that the interpreter made for the bootstrap.
        """
        self._load = load
        self._folder = folder
        self._failed = False
        if fork_server := os.environ.pop("DDPLAUNCH_FORK_SERVER", ""):
            socket, *modules = fork_server.split(",")
            sys.argv[1:] = load("fork_server")["serve"](load, int(socket), modules, sys.argv[1:])
        elif warm := os.environ.pop("DDPLAUNCH_WARM", ""):
            sys.argv[1:] = load("warm")["serve"](load, *warm.split(","))

        # taken out of the environment: these are for this process, not for its children
        self._error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
        self._recorder = os.environ.pop("DDPLAUNCH_RECORDER", "")
        self._pipe = os.environ.pop("DDPLAUNCH_NOTIFY", "")
        if slow_imports := os.environ.pop("DDPLAUNCH_SLOW_IMPORTS", ""):
            load("import_times")["measure"](slow_imports)
        debugger = os.environ.pop("DDPLAUNCH_DEBUGGER", ",,").split(",")
        self._debugger, attach_signal, self._how_debugged, *debugpy = debugger
        os.register_at_fork(after_in_child=self._forget)
        if stacks := os.environ.pop("DDPLAUNCH_STACKS", ""):
            fd, signum = map(int, stacks.split(","))
            signals = load("signals")
            signals["offer_stacks"](fd, signum)
            if attach_signal:
                signals["offer_debugger"](fd, int(attach_signal), self._debugger, load)
        self._prepare_torch()
        if debugpy:
            self._held = load("debugger")["wait_for_client"](self._debugger, load)
        self._program = load("program")
        self.run, self.arguments = self._program["prepare"](sys.argv[1], sys.argv[2], sys.argv[3:], names, self._record)

    def failed(self, error: BaseException) -> None:
        """Do what follows from the exception that has ended the program, and is raised again."""
        self._failed = not isinstance(error, SystemExit) or error.code not in (None, 0)
        self._program["hide_first_frame"](error)
        self._record(error)
        if self._how_debugged == "on-error":
            self._load("debugger")["post_mortem"](error, self._debugger)

    def _prepare_torch(self) -> None:
        """Have torch set up as the variables say, when the program imports it."""
        device = os.environ.pop("DDPLAUNCH_PIN_DEVICE", "")
        sharing = os.environ.get("DDPLAUNCH_SHARING_STRATEGY", "")
        port = os.environ.get("MASTER_PORT", "")
        if device or sharing or port:
            settings = self._load("torch_settings")
            if device:
                settings["pin"](device)
            if sharing:
                settings["share"](sharing)
            if port:
                settings["when_importing"]("torch", lambda: self._notify(b"t"))
                settings["when_imported"]("torch.distributed", self._extend)

    def _extend(self, distributed: "Any") -> None:
        """Extend torch.distributed: groups that end without a deadlock, the store as under torchrun, records of collectives."""
        load = self._load
        self._notify(b"i")
        try:
            process_group = load("process_group")
            process_group["destroy_at_exit"](distributed, lambda: self._failed)
            process_group["hold_for_reducers"](distributed)
            server = os.path.join(self._folder, "store.py")
            load("store")["host_for_clients"](distributed, server, lambda: self._notify(b"s"))
            if self._how_debugged:
                process_group["raise_timeouts"](distributed)
            if self._recorder:
                load("recorder")["switch_on"](distributed, self._recorder, lambda: self._notify(b"j"))
        except Exception:  # noqa: BLE001, S110 - not the torch that we know, or not our variables: leave it as it is
            pass

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
        """Send the agent a byte through its pipe, see RAISED and the others in report/error_file.py.

        A pipe, since a signal could hit a process that has got the pid of an agent that ended.
        """
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
        """Write no error file in a forked child, whose exception has not ended the worker."""
        self._error_file = self._how_debugged = ""


def _make_room_for_files() -> None:
    """Close stdin, which nobody will read any more, if the program has opened as many files as it may."""
    try:
        os.close(os.open("/", os.O_RDONLY))
    except OSError:
        os.close(0)
