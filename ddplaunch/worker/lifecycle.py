"""What the bootstrap of a worker does before its program runs, and once the program has ended. Runs nothing of the program.

The process is prepared as plain `python` does. What that imitates is in CPython: Modules/main.c (`pymain_run_python`),
Python/pathconfig.c (`sys.path[0]`) and Python/pythonrun.c (the names of `__main__`, .pyc files).
"""

import os
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType, TracebackType
    from typing import Any

    Load = Callable[[str], ModuleType]  # the bootstrap's: returns a file beside this one as a module
    Run = tuple[Callable[..., object], tuple[object, ...]]  # the function that runs the program, and its arguments

# what a worker tells the agent, the same as in spec/error_file.py: an exception is in its file, it is in a process group, it
# begins to import torch, it has imported torch, it wants torch's store hosted, its script has ended, its exception is final
RAISED, JOINED, IMPORTING, IMPORTED, STORE_WANTED, SCRIPT_ENDED, FINAL = b"r", b"j", b"t", b"i", b"s", b"e", b"f"


class Lifecycle:
    """One worker, from the start of its interpreter to the exception that ends its program."""

    def __init__(self, load_sibling: "Load", folder: str, names: "Mapping[str, object]") -> None:
        """Make this process ready for the program, as variables of the agent say: `run(*arguments)` is the call that runs it.

        In a fork server or a warm interpreter, this returns in each forked worker and never in the server. `folder` is that
        of this file; `names` are those of the `__main__` that the interpreter made for the bootstrap.
        """
        self._load_sibling = load_sibling
        self._folder = folder
        self._has_failed = False  # the program, which has ended
        self._error_file = ""
        _call_at_the_very_end(self._on_exit)
        if fork_server := os.environ.pop("DDPLAUNCH_FORK_SERVER", ""):
            socket, *modules = fork_server.split(",")
            sys.argv[1:] = load_sibling("fork_server").serve(int(socket), modules, sys.argv[1:])
        elif warm := os.environ.pop("DDPLAUNCH_WARM", ""):
            sys.argv[1:] = load_sibling("warm").serve(load_sibling, *warm.split(","))

        # taken out of the environment where they are for this process, and not for its children
        self._error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
        self._recorder_socket = os.environ.pop("DDPLAUNCH_RECORDER", "")  # path: collectives can be read there
        self._notify_pipe = os.environ.pop("DDPLAUNCH_NOTIFY", "")  # path of the pipe by which workers notify the agent
        if slow_imports := os.environ.pop("DDPLAUNCH_SLOW_IMPORTS", ""):
            load_sibling("imports").measure(slow_imports)
        # the agent's address for debuggers; the signal for a client that attaches, or ""; "on-error" or another way in which
        # debuggers may hold workers of this job, or ""; and a fourth word if this worker is to wait for a client of debugpy
        debugger = os.environ.pop("DDPLAUNCH_DEBUGGER", ",,").split(",")
        self._agent_address, attach_signal, self._how_debugged, *debugpy = debugger
        os.register_at_fork(after_in_child=self._claim_no_exception)
        if stacks := os.environ.pop("DDPLAUNCH_STACKS", ""):
            fd, signum = map(int, stacks.split(","))
            signals = load_sibling("signals")
            signals.offer_stacks(fd, signum)
            if attach_signal:
                signals.offer_debugger(fd, int(attach_signal), self._agent_address, load_sibling)
        if check := os.environ.pop("DDPLAUNCH_CHECK_NOTES", ""):
            steps, seconds, path = check.split(",", 2)
            load_sibling("check").begin(load_sibling, steps, seconds, path)
        else:
            self._prepare_torch()
        if debugpy:
            # kept open: as long as it is, the agent knows that a debugger may hold this worker
            self._agent_connection = load_sibling("debugger").wait_for_client(self._agent_address, load_sibling)
        _bootstrap, kind, target, *arguments = sys.argv
        self.run, self.arguments = prepare(kind, target, arguments, names, self._record)

    def failed(self, error: BaseException) -> None:
        """Do what follows from the exception that has ended the program, and is raised again."""
        self._has_failed = not isinstance(error, SystemExit) or error.code not in (None, 0)
        hide_first_frame(error)
        self._record(error)
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            self.finished()  # of any other exception the agent knows by the error file
        if self._how_debugged == "on-error":
            self._load_sibling("debugger").post_mortem(error, self._agent_address, self._load_sibling)

    def finished(self) -> None:
        """Tell the agent that the script has ended: threads of it, or functions for the exit, may keep the process."""
        self._mark(".ended", SCRIPT_ENDED)

    def _on_exit(self) -> None:
        """Tell the agent, if the program has failed, that nothing of it runs any more: no hook, no thread, no exit function.

        Only the interpreter still ends, which takes half a second with torch.
        """
        if self._has_failed:
            self._mark(".final", FINAL)

    def _mark(self, suffix: str, what: bytes) -> None:
        """Make an empty file beside the error file, by which the agent knows this worker, and send the agent the byte for it."""
        if not self._error_file:
            return
        try:
            os.close(os.open(self._error_file + suffix, os.O_WRONLY | os.O_CREAT, 0o600))
            self._notify(what)
        except Exception:  # noqa: BLE001, S110 - the program is ending, and may have changed anything
            pass

    def _prepare_torch(self) -> None:
        """Have torch set up, as our variables say, at the moment when the program imports torch."""
        device = os.environ.pop("DDPLAUNCH_PIN_DEVICE", "")  # such as "cuda:2"
        sharing = os.environ.get("DDPLAUNCH_SHARING_STRATEGY", "")
        port = os.environ.get("MASTER_PORT", "")
        if not (device or sharing or port):  # a job without the variables of torch.distributed
            return
        imports = self._load_sibling("imports")
        if device:
            imports.pin_device(device)
        if sharing:
            imports.set_sharing_strategy(sharing)

        def follow(trainer: "Any") -> None:
            if self._error_file:
                self._load_sibling("progress").follow_trainer(trainer, self._error_file)

        imports.when_imported("transformers.trainer", follow)
        if port:
            imports.when_importing("torch", lambda: self._notify(IMPORTING))
            imports.when_imported("torch.distributed", self._extend_distributed)

    def _extend_distributed(self, distributed: "Any") -> None:
        """Extend torch.distributed: groups that end without a deadlock, the store as under torchrun, records of collectives."""
        self._notify(IMPORTED)
        changes = self._load_sibling("distributed")
        changes.destroy_at_exit(distributed, lambda: self._has_failed)
        changes.hold_for_reducers(distributed)
        host_program = os.path.join(self._folder, "store.py")
        self._load_sibling("store").host_for_clients(distributed, host_program, lambda: self._notify(STORE_WANTED))
        if self._how_debugged:
            changes.raise_timeouts(distributed)
        if self._recorder_socket:
            changes.record_collectives(distributed, self._recorder_socket, lambda: self._notify(JOINED))

    def _record(self, error: BaseException) -> None:
        """Write the error file, if the agent wants one; never raise, so that the program ends as it would without us."""
        if not self._error_file:
            return
        try:
            try:
                os.close(os.open("/", os.O_RDONLY))  # try whether this process may open a file
            except OSError:  # the program has opened as many as it may: give up stdin, which nobody will read any more
                os.close(0)
            self._load_sibling("error_file").record(error, self._error_file)
            if os.path.exists(self._error_file):  # not where the program chose to exit, or for Ctrl-C
                self._notify(RAISED)
        except BaseException:  # noqa: BLE001, S110 - also what a signal handler raises: the program is ending already
            pass

    def _notify(self, what: bytes) -> None:
        """Send the agent one byte through its pipe: RAISED or another.

        A pipe, since a signal could hit a process that has got the pid of an agent that ended.
        """
        try:
            if stat.S_ISFIFO(os.stat(self._notify_pipe).st_mode):  # to open anything else could have effects, or wait
                pipe = os.open(self._notify_pipe, os.O_WRONLY | os.O_NONBLOCK)
                try:
                    os.write(pipe, what)
                finally:
                    os.close(pipe)
        except OSError:
            pass

    def _claim_no_exception(self) -> None:
        """Write no error file in a forked child, whose exception has not ended the worker."""
        self._error_file = self._how_debugged = ""


def _call_at_the_very_end(function: "Callable[[], None]") -> None:
    """Have a function called behind those that the program registers for its exit, as the first to be registered is.

    Not before Python 3.10, where each import of `atexit` has functions of its own, and only those of one are called.
    """
    if sys.version_info < (3, 10):
        return
    is_imported = "atexit" in sys.modules
    import atexit

    atexit.register(function)
    if not is_imported:  # else the program finds it without an import
        del sys.modules["atexit"]


IMPORTLIB: "Any" = sys.modules["_frozen_importlib_external"]  # what importlib.machinery offers, without an import


def prepare(
    kind: str,
    target: str,
    arguments: "list[str]",
    names: "Mapping[str, object]",
    record: "Callable[[BaseException], None]",
) -> "Run":
    """Return the function that runs the program, and its arguments; make import path, `sys.argv` and `__main__` the program's.

    `kind` is "script" or "module". `names` are those of the `__main__` that the interpreter made for the bootstrap. If the
    program cannot even be compiled, `record` gets the exception, and plain python replaces this process and reports it.
    """
    # since 3.11: python puts no folder in front of the import path
    is_safe_path = getattr(sys.flags, "safe_path", False)
    # a debugger puts the bootstrap's folder there anyway
    is_ours = sys.path[:1] == [os.path.dirname(str(names["__file__"]))]
    if not is_safe_path or is_ours:
        del sys.path[0]
    plain_command = _set_orig_argv([*(["-m"] if kind == "module" else []), target, *arguments])
    import faulthandler

    try:
        if not faulthandler.is_enabled():  # a .pth file or sitecustomize may have it write elsewhere
            faulthandler.enable()  # prints the stacks of all threads when a signal like SIGSEGV ends the process
    except Exception:  # noqa: BLE001, S110 - stderr is closed, or is no file
        pass

    if kind == "module":
        sys.argv = ["-m", *arguments]
        try:
            if not is_safe_path:
                sys.path.insert(0, os.getcwd())
        except OSError:  # the working directory was removed
            pass
        return _run_module(names, target, alter_argv=True)  # runpy puts the module's path in place of "-m"

    sys.argv = [target, *arguments]
    path = _absolute(target)
    content = b""
    try:
        if _has_importer(path):  # a directory or a zip file
            sys.path.insert(0, path)
            return _run_module(names, "__main__", alter_argv=False)
        with open(path, "rb") as file:
            content = file.read()
        code, loader = _code(content, path)
    except Exception as error:  # noqa: BLE001 - any error of plain python too
        # the script is a pipe, which plain python could not read again: have the bootstrap raise the error
        if content and not os.path.isfile(path):
            return compile, (content, path, "exec", 0, True)
        error.__traceback__ = None  # all of it is ours
        record(error)
        os.execv(sys.executable, plain_command)  # nothing of the program has run yet, and plain python reports it best
    if not is_safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(target)))
    main = _become_main(names, __loader__=loader("__main__", path), __file__=path)
    return exec, (code, main)


def hide_first_frame(error: BaseException) -> None:
    """Take our frame off the traceback that the interpreter will print when `error` is raised again."""
    if error.__traceback__ is None:
        return
    first = error.__traceback__.tb_frame
    error.__traceback__ = error.__traceback__.tb_next
    if sys.version_info >= (3, 11):
        return

    # Before 3.11 `raise` restores the traceback as it was caught, so it has to be corrected once more on its way to the hook.
    hook = sys.excepthook

    def excepthook(kind: "type[BaseException]", value: BaseException, traceback: "TracebackType | None") -> None:
        if sys.excepthook is excepthook:
            sys.excepthook = hook
        if traceback is not None and traceback.tb_frame is first:
            value.__traceback__ = sys.last_traceback = traceback.tb_next
        hook(kind, value, value.__traceback__)

    sys.excepthook = excepthook


def _set_orig_argv(argv: "list[str]") -> "list[str]":
    """Make `sys.orig_argv` the command line that plain python would have for these arguments, and return it."""
    if sys.version_info < (3, 10):
        return [sys.executable, *argv]
    sys.orig_argv[-len(sys.argv) :] = argv
    return sys.orig_argv


def _absolute(path: str) -> str:
    """Return the path as `__file__` and tracebacks show it."""
    if path.startswith("/") or sys.version_info < (3, 9):
        return path
    try:
        folder = os.getcwd()
    except OSError:  # the working directory was removed
        return path
    return folder if path in ("", ".") and sys.version_info >= (3, 11) else f"{folder}/{path}"


def _has_importer(path: str) -> bool:
    """Return whether modules can be imported from the path itself, as from a folder or zip file (as PyImport_GetImporter)."""
    if path not in sys.path_importer_cache:
        sys.path_importer_cache[path] = None
        for hook in sys.path_hooks:
            try:
                sys.path_importer_cache[path] = hook(path)
                break
            except ImportError:
                continue
    return sys.path_importer_cache[path] is not None


def _code(content: bytes, path: str) -> "tuple[Any, Any]":
    """Return the code of a script and the class of its `__loader__`."""
    magic = IMPORTLIB.MAGIC_NUMBER  # 4 bytes; python knows a .pyc file of any name by the first 2
    if not path.endswith(".pyc") and content[:2] != magic[:2]:
        return compile(content, path, "exec", dont_inherit=True), IMPORTLIB.SourceFileLoader
    if content[:4] != magic:
        raise RuntimeError("Bad magic number in .pyc file")
    import marshal

    return marshal.loads(memoryview(content)[16:]), IMPORTLIB.SourcelessFileLoader  # behind magic, flags, time and size


def _run_module(names: "Mapping[str, object]", name: str, *, alter_argv: bool) -> "Run":
    import runpy

    main = _become_main(names, __loader__=None)
    for unset in ("__file__", "__cached__"):
        main.pop(unset, None)
    run: Any = runpy._run_module_as_main  # type: ignore[attr-defined]  # what `python -m` calls: same traceback
    return run, (name, alter_argv)


def _become_main(names: "Mapping[str, object]", **changed: object) -> "dict[str, object]":
    """Make the program's `__main__`, with the names that the interpreter gave ours; return them."""
    main = type(sys)("__main__")
    main.__dict__.update({name: value for name, value in names.items() if name[:2] == "__"})
    # of a script, which a debugger that has loaded us runs in a module with others
    main.__dict__.update({name: None for name in ("__spec__", "__package__", "__cached__") if name in names})
    main.__dict__.update(__doc__=None, **changed)
    sys.modules["__main__"] = main
    return main.__dict__
