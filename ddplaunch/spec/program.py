"""Checks that the program of the workers exists and can be run, before anything starts. Runs and imports nothing."""

from __future__ import annotations

import os
import re
import stat
import sys
import zipimport
from collections.abc import Iterator

from ddplaunch.spec.job import Program, ProgramKind
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.exitcodes import NOT_EXECUTABLE, NOT_FOUND
from ddplaunch.system.words import did_you_mean

_LONGEST_FIRST_LINE = 256  # bytes that the kernel reads of it (BINPRM_BUF_SIZE)
_HEAD_SIZE = 1 << 20  # bytes of a script that are read; a longer one is not parsed
_SUFFIXES_OF_SETTINGS = (".yaml", ".yml", ".json", ".toml", ".ini", ".cfg")
_SUFFIXES_OF_TEXTS = (".csv", ".tsv", ".md", ".rst", ".log", ".html", ".xml")
_FIRST_LINE_OF_SHELL_SCRIPT = rb"#!.*\b(ba|da|k|z|fi)?sh\b"
_BEGINNING_OF_ELF = b"\x7fELF"
_COMPILED_PYTHON = b"\r\n"  # third and fourth byte, of any version


def check(program: Program, search_path: str | None) -> None:
    """Check the program and its interpreter; `search_path` is the PATH that the workers will have.

    Raises LaunchError: it does not exist or cannot be run; with status 126 or 127 if it is a command.
    """
    match program.kind:
        case ProgramKind.COMMAND:
            _check_command(program.target, search_path)
            return
        case ProgramKind.SCRIPT:
            _check_script(program.target, search_path, by_our_python=program.python is None)
        case ProgramKind.MODULE:
            _check_module(program.target, by_our_python=program.python is None)
    if program.python is not None:
        _check_command(
            program.python, search_path, hint="--python takes a path, or a name on PATH", is_interpreter=True
        )


def _check_script(target: str, search_path: str | None, *, by_our_python: bool) -> None:
    """Check that every worker can read the script again, and that it is Python; `by_our_python`: our interpreter runs it."""
    head = _read_head(target, search_path)
    if head is None:  # a directory, which has a __main__.py
        return
    try:
        archive = zipimport.zipimporter(target)
    except zipimport.ZipImportError:
        archive = None
    if archive is None:
        _check_source(target, head, by_our_python=by_our_python)
    elif archive.find_spec("__main__") is None:
        raise LaunchError(
            f"{target} is a zip file without __main__.py", hint="python runs a zip file by the __main__.py in it"
        )


def _read_head(target: str, search_path: str | None) -> bytes | None:
    """Return the first bytes of a script; None for a directory with a __main__.py, which python runs as well.

    Raises LaunchError: it cannot be read from its beginning by every worker.
    """
    if target == "-":
        raise LaunchError(
            "a script cannot come from standard input: every worker would need all of it", hint="write it to a file"
        )
    try:
        mode = os.stat(target).st_mode
        if stat.S_ISDIR(mode):
            if not any(os.path.exists(os.path.join(target, main)) for main in ("__main__.py", "__main__.pyc")):
                raise LaunchError(f"{target} is a directory without __main__.py", hint=_directory_hint(target))
            return None
        if not stat.S_ISREG(mode):
            raise LaunchError(
                f"{target} is not a file that every worker can read from its beginning", hint="write it to a file"
            )
        with open(target, "rb") as file:
            return file.read(_HEAD_SIZE)
    except (FileNotFoundError, NotADirectoryError):
        missing = f"{target} does not exist" if target else "the name of the script is empty"
        if os.path.islink(target):
            missing = f"{target} is a link to {os.readlink(target)}, which does not exist"
        raise LaunchError(missing, hint=_missing_hint(target, search_path)) from None
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or "embedded null byte").lower()  # the only other error of open()
        raise LaunchError(f"cannot read {target}: {reason}") from None


def _check_source(target: str, head: bytes, *, by_our_python: bool) -> None:
    """Check that a file which is no zip file is Python source; one named .py is taken for that, whatever is in it."""
    if target.endswith(".py"):
        return
    if other := _kind_if_not_python(target, head):
        kind, hint = other
        raise LaunchError(f"{target} is a {kind}, not a Python script", hint=hint)
    is_whole, is_text = len(head) < _HEAD_SIZE, b"\0" not in head
    # another interpreter may be of a version with another syntax
    if by_our_python and is_whole and is_text and (reason := _syntax_error(target, head)):
        raise LaunchError(f"{target} is not a Python script: {reason}", hint="name the script, such as train.py")


def _missing_hint(target: str, search_path: str | None) -> str | None:
    """Return a hint for a script that does not exist: a similar name, a module, a command, or where it was looked for.

    None: there is no better one than the error itself.
    """
    if os.path.islink(target):  # the error names the file that is missing
        return None
    if not target:
        return "a variable of the shell that is not set leaves an empty name"
    folder, name = os.path.split(target)
    try:
        names = [entry for entry in os.listdir(folder or ".") if not entry.startswith(".")]
    except OSError:
        return f"the folder {folder} does not exist" if folder else None
    if os.path.splitext(name)[0] + ".py" in names:
        return f"did you mean `{os.path.splitext(target)[0]}.py`?"
    # an installed module is likelier than a file of a similar name
    if not folder and _is_dotted(name) and not name.endswith(".py") and _top_level(name) is not None:
        return f"to run a module, type `ddplaunch -m {name}`"
    if meant := did_you_mean(name, names, cutoff=0.75):
        return f"did you mean `{os.path.join(folder, meant)}`?"
    if not folder and any(_is_program(file) for file in _on_path(name, search_path)):
        return f"to run a command that is no Python script, type `ddplaunch --no-python {name} ...`"
    if os.path.isabs(target):
        return None
    here = working_directory()
    # a folder of that name may be there again, and is not the one in which the shell is
    return f"looked in {here}" if here else 'the folder of this shell was removed: type `cd "$PWD"` first'


def _directory_hint(target: str) -> str:
    """Return a hint for a directory that Python cannot run: the script in it that was probably meant."""
    try:
        scripts = sorted(entry for entry in os.listdir(target) if entry.endswith(".py") and entry != "__init__.py")
    except OSError:
        scripts = []
    if not scripts:
        return "python runs a directory by the __main__.py in it"
    script = next((name for name in ("train.py", "main.py") if name in scripts), scripts[0])
    return f"name the script in it, such as {os.path.join(target, script)}"


def _check_module(target: str, *, by_our_python: bool) -> None:
    """Check that -m names a module, and, if our interpreter runs it (`by_our_python`), that the module is there."""
    if not _is_dotted(target):
        dotted = target.removesuffix(".py").strip("./").replace("/", ".")
        raise LaunchError(
            f"-m {target}: a module has a dotted name",
            hint=f"type `-m {dotted}`, or leave -m out to run a file" if _is_dotted(dotted) else None,
        )
    if target.endswith(".py") and os.path.exists(target):
        raise LaunchError(
            f"-m {target}: this is a file",
            hint=f"type `-m {target.removesuffix('.py')}`, or leave -m out to run a file",
        )
    if by_our_python and _top_level(target) is None:
        top = target.partition(".")[0]
        raise LaunchError(
            f"-m {target}: there is no module {top} in {working_directory() or '.'} or installed for {sys.executable}",
            hint="--python names another interpreter, PYTHONPATH more folders",
        )


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _top_level(module: str) -> object | None:
    """Return what stands for the package that `module` begins with, as a worker here would find it; None if there is none."""
    from importlib.machinery import PathFinder
    from importlib.util import find_spec  # takes a millisecond, and most jobs do not need it

    top = module.partition(".")[0]
    try:
        return PathFinder.find_spec(top, [working_directory() or "."]) or find_spec(top)
    except ValueError:
        return top  # this process has loaded it without a spec, so that it exists


def _check_command(
    target: str, search_path: str | None, *, hint: str | None = None, is_interpreter: bool = False
) -> None:
    """Check that a command is an executable file, on PATH or at its path; `hint` is for the error.

    An interpreter may have been named by the folder that it is in.
    """
    files = [target] if "/" in target or target in (".", "..") else list(_on_path(target, search_path))
    program = next(filter(_is_program, files), None)
    if program is not None:
        _check_interpreter_of(program)
        return
    found = next((file for file in files if os.path.lexists(file)), None)
    if found is None and is_interpreter and os.path.isdir(target):
        found = target
    if found is None:
        where = "does not exist" if "/" in target else "was not found on PATH"
        if not is_interpreter and "/" not in target and os.path.isfile(target):
            is_script = target.endswith(".py")
            hint = "leave --no-python out" if is_script else f"for the file in this folder type `./{target}`"
        raise LaunchError(f"{target or 'a command without a name'} {where}", hint=hint, status=NOT_FOUND)
    if os.path.isdir(found):
        reason = "is a directory"
        if is_interpreter and _is_program(inside := os.path.join(found, "bin", "python")):  # of a virtual environment
            hint = f"type `--python {inside}`"
    elif not os.path.exists(found):
        reason = "is a link to a missing file"
    else:
        reason = "is not executable"
        hint = hint or f"type `chmod +x {found}`" + ("; or leave --no-python out" if found.endswith(".py") else "")
    raise LaunchError(f"{found} {reason}", hint=hint, status=NOT_EXECUTABLE)


def _check_interpreter_of(script: str) -> None:
    """Check that the interpreter in a script's first line exists: the kernel would say that the script does not (execve(2))."""
    try:
        with open(script, "rb") as file:
            first = file.readline(_LONGEST_FIRST_LINE)
    except OSError:
        return  # a program need not be readable
    if not first.startswith(b"#!"):
        return
    if first.endswith(b"\r\n"):
        import shlex  # only this error needs it

        hint = f"type `sed -i 's/\\r$//' {shlex.quote(script)}`"
        raise LaunchError(f"{script} has the line ends of Windows", hint=hint, status=NOT_FOUND)
    words = os.fsdecode(first[2:]).split()
    if words and not os.path.exists(words[0]):
        raise LaunchError(f"{words[0]}, named in the first line of {script}, does not exist", status=NOT_FOUND)


def _on_path(name: str, path: str | None) -> Iterator[str]:
    if name:
        for folder in (os.defpath if path is None else path).split(os.pathsep):
            yield os.path.join(folder or ".", name)


def _is_program(file: str) -> bool:
    return os.path.isfile(file) and os.access(file, os.X_OK)


def working_directory() -> str | None:
    """The working directory; None if it has been removed, so that no file can be in it."""
    try:
        return os.getcwd()
    except OSError:
        return None


# --- scripts of another language, by name and content


def _kind_if_not_python(target: str, content: bytes) -> tuple[str, str] | None:
    """Return what kind of file a script is that is not Python, and what to type; None if it may be Python."""
    stem, suffix = os.path.splitext(target)
    if suffix == ".ipynb":
        return "notebook", (
            f"type `jupyter nbconvert --to script {target}`, then `ddplaunch {stem}.py`; in the notebook itself "
            "`ddplaunch.launch(function)` starts workers"
        )
    if suffix in _SUFFIXES_OF_SETTINGS:
        return "configuration file", f"the script comes first: `ddplaunch train.py {target}`"
    if suffix in _SUFFIXES_OF_TEXTS:
        return "text file", "name the script, such as train.py"
    if b"\n#SBATCH" in content:
        return "batch script", f"type `sbatch {target}`"
    if suffix in (".sh", ".bash", ".zsh") or re.match(_FIRST_LINE_OF_SHELL_SCRIPT, content):
        return "shell script", (
            f"type `bash {target}` if it starts ddplaunch, or `ddplaunch --no-python bash {target}` for one in each worker"
        )
    is_compiled_python = content[2:4] == _COMPILED_PYTHON  # *.pyc
    if content.startswith(_BEGINNING_OF_ELF) or (b"\0" in content and not is_compiled_python):
        program = target if "/" in target else f"./{target}"
        return "binary file", f"if it is a program, type `ddplaunch --no-python {program}`"
    return None


def _syntax_error(target: str, source: bytes) -> str | None:
    """Return the first syntax error of a source; None if there is none."""
    import warnings  # few scripts need it: nearly all are named .py, and are not compiled here

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the worker's interpreter gives the same ones
        try:
            compile(source, target, "exec", dont_inherit=True)
        except SyntaxError as error:
            return f"line {error.lineno}: {error.msg}"
    return None
