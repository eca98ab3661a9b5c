"""Prepares this process as plain `python` does for the program. Runs nothing of the program itself.

What it imitates is CPython's Modules/main.c (`pymain_run_python`), Python/pathconfig.c (`sys.path[0]`) and
Python/pythonrun.c (the names of `__main__`, .pyc files).
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType
    from typing import Any

    Run = tuple[Callable[..., object], tuple[object, ...]]

FILES: "Any" = sys.modules["_frozen_importlib_external"]  # what importlib.machinery offers, without an import


def prepare(
    kind: str,
    target: str,
    arguments: "list[str]",
    names: "Mapping[str, object]",
    record: "Callable[[BaseException], None]",
) -> "Run":
    """Return the function that runs the program, and its arguments.

    `names` are those of the `__main__` that the interpreter made for us; `record` is called with the exception if the program
    cannot even be compiled.
    """
    safe_path = getattr(sys.flags, "safe_path", False)  # since 3.11
    if not safe_path:
        del sys.path[0]  # our folder
    command = _command([*(["-m"] if kind == "module" else []), target, *arguments])
    _enable_faulthandler()

    if kind == "module":
        sys.argv = ["-m", *arguments]
        if not safe_path:
            _add_working_directory()
        return _run_module(names, target, True)

    sys.argv = [target, *arguments]
    path = _absolute(target)
    content = b""
    try:
        if _has_importer(path):  # a directory or a zip file
            sys.path.insert(0, path)
            return _run_module(names, "__main__", False)
        with open(path, "rb") as file:
            content = file.read()
        code, loader = _code(content, path)
    except Exception as error:  # noqa: BLE001 - any error of plain python too
        if content and not os.path.isfile(path):  # a pipe: it cannot be read again
            return compile, (content, path, "exec", 0, True)
        error.__traceback__ = None  # all of it is ours
        record(error)
        os.execv(sys.executable, command)  # nothing of the program has run yet, and plain python reports it best
    if not safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(target)))
    main = _become_main(names, __loader__=loader("__main__", path), __file__=path)
    return exec, (code, main)


def hide_first_frame(error: BaseException) -> None:
    """Take our frame off the traceback that the interpreter will print when `error` is raised again."""
    if error.__traceback__ is None:
        return
    error.__traceback__ = error.__traceback__.tb_next
    if sys.version_info >= (3, 11):
        return

    # Before 3.11 `raise` restores the traceback as it was caught, so it has to be corrected once more on its way to the hook.
    hook = sys.excepthook

    def excepthook(kind: "type[BaseException]", value: BaseException, traceback: "TracebackType | None") -> None:
        sys.excepthook = hook
        value.__traceback__ = sys.last_traceback = traceback and traceback.tb_next
        hook(kind, value, value.__traceback__)

    sys.excepthook = excepthook


def _command(argv: "list[str]") -> "list[str]":
    """Return plain python's command line, and put it into `sys.orig_argv`."""
    if sys.version_info < (3, 10):
        return [sys.executable, *argv]
    sys.orig_argv[-len(sys.argv) :] = argv
    return sys.orig_argv


def _enable_faulthandler() -> None:
    """Have the stacks of all threads printed when a signal like SIGSEGV ends the process."""
    import faulthandler

    try:
        faulthandler.enable()
    except Exception:  # noqa: BLE001, S110 - stderr is closed, or is no file
        pass


def _absolute(path: str) -> str:
    """Return the path as `__file__` and tracebacks show it."""
    if path.startswith("/") or sys.version_info < (3, 9):
        return path
    try:
        folder = os.getcwd()
    except OSError:  # the working directory was removed
        return path
    return folder if path in ("", ".") and sys.version_info >= (3, 11) else f"{folder}/{path}"


def _add_working_directory() -> None:
    try:
        sys.path.insert(0, os.getcwd())
    except OSError:
        pass


def _has_importer(path: str) -> bool:
    """Say whether modules can be imported from the path itself, as PyImport_GetImporter would find."""
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
    magic = FILES.MAGIC_NUMBER
    if not path.endswith(".pyc") and content[:2] != magic[:2]:
        return compile(content, path, "exec", dont_inherit=True), FILES.SourceFileLoader
    if content[:4] != magic:
        raise RuntimeError("Bad magic number in .pyc file")
    import marshal

    return marshal.loads(memoryview(content)[16:]), FILES.SourcelessFileLoader  # behind magic, flags, time and size


def _run_module(names: "Mapping[str, object]", name: str, alter_argv: bool) -> "Run":
    import runpy

    main = _become_main(names, __loader__=None)
    for unset in ("__file__", "__cached__"):
        main.pop(unset, None)
    run: Any = runpy._run_module_as_main  # type: ignore[attr-defined]  # what `python -m` calls: same traceback
    return run, (name, alter_argv)


def _become_main(names: "Mapping[str, object]", **changed: object) -> "dict[str, object]":
    """Make the program's `__main__`, with the names that the interpreter gave ours; return them."""
    main = type(sys)("__main__")
    main.__dict__.update({name: value for name, value in names.items() if name[:2] == "__"}, __doc__=None, **changed)
    sys.modules["__main__"] = main
    return main.__dict__
