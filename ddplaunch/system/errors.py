"""The error of a command that cannot be carried out: raised anywhere, printed once, in `cli/main.py`."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ddplaunch.system.exitcodes import NOT_EXECUTABLE, USAGE
from ddplaunch.system.redaction import Redactor, literals
from ddplaunch.system.words import why_failed

MORE_OPEN_FILES = (
    "`ulimit -n 4096`; if that is refused, limits.conf(5) sets the limit, or `docker run --ulimit nofile=4096`"
)


class LaunchError(Exception):
    """A mistake of the user or a fact of the machine, in one sentence; never a bug of ours.

    `message` is in lower case, has no final period and names the value and where it came from;
    `hint` is what to type instead; `status` is the exit status of the command. `then`, if there is one, is to be called once the
    error is printed, since it may take seconds. `is_same_in_each_task`: it lies in the command line, as an option that does not
    exist, so that of several tasks with the same line (of srun) one is enough to print it.
    """

    then: Callable[[], object] | None = None
    is_same_in_each_task = False

    def __init__(self, message: str, *, hint: str | None = None, status: int = USAGE) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.status = status

    def render(self) -> str:
        """The text for stderr, without secrets: a message names the value that is wrong, a hint what was typed."""
        text = f"error: {indented(self.message)}\n"
        text = f"{text}\nhint: {indented(self.hint)}\n" if self.hint else text
        return shown(text)


@contextmanager
def own_imports() -> Iterator[None]:
    """Make an error of whatever the imports of our own modules raise in this block, which does nothing else.

    Raises:
        LaunchError: one cannot be imported.
        OSError: there are too many open files.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise not_imported(error) from None


def not_imported(error: Exception) -> LaunchError:
    """Make a LaunchError of what the import of our own modules has raised: files are missing, unreadable, or of two versions."""
    file, line = "", 0
    traceback = error.__traceback__
    while traceback is not None:  # to the innermost line of a file, or the file that was being read
        frame = traceback.tb_frame
        if not (name := frame.f_code.co_filename).startswith("<"):  # "<frozen importlib...>" is Python's own
            file, line = name, traceback.tb_lineno
        elif frame.f_code.co_name == "get_data":  # in which importlib reads the file `path`
            file, line = str(frame.f_locals.get("path")), 0
        traceback = traceback.tb_next
    why = f"{type(error).__name__}: {error}"
    hint = (
        "its files are gone, or were changed after the command began, as by an upgrade: run it again; if that fails as well, "
        "install it again"
    )
    if isinstance(error, OSError):
        why = why_failed(error)
        if error.filename:
            file, line = str(error.filename), 0
        if not line:  # else a call failed in that line, as of a library: no file of ours
            hint = (
                f"if `cat {file}` fails as well, it is the file system: mount it again, or install ddplaunch on another"
            )
    at = f"{file}, line {line}" if line else file
    return LaunchError(f"ddplaunch cannot import its modules: {at}: {why}", hint=hint, status=NOT_EXECUTABLE)


# C0 and C1 but for newline, tab, and our own styles and links (`console/paint.py`); marks that reorder text or end a line;
# what cannot be encoded, and bytes of C1 that were no UTF-8
_OBEYED = (
    r"\x1b(?!\[(?:0|1|2|36|1;31|1;36)m|\]8;;(?:file://[!-~]+)?\x1b\\|\\)|"
    r"[\0-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udc9f\udd00-\udfff]"
)


def visible(text: str) -> str:
    """Write what a terminal would obey as escapes: others have their part in names, exceptions and messages that we print."""
    if text.isascii() and text.replace("\n", "").isprintable():
        return text  # as nearly all is; to compile the pattern takes 1 ms
    return re.sub(_OBEYED, lambda found: found[0].encode("unicode_escape").decode(), text)


def shown(text: str) -> str:
    """Return a text of ours as others may see it: without secrets, and with nothing that a terminal obeys."""
    return visible(Redactor(literals(os.environ)).text(text))


def indented(text: str) -> str:
    """Return the text with all lines but the first indented: lines of ours alone begin at the left edge."""
    return re.sub(r"\n(?=[^ \n])", "\n  ", text) if "\n" in text else text


def write_stderr(text: str) -> None:
    """Write to stderr if that is open; if not, there is still the exit status."""
    if sys.stderr is not None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except OSError:
            pass


def tell(text: str) -> None:
    """Write a line of ours to stderr, as others may see it."""
    write_stderr(shown(text))


def say(text: str) -> None:
    """Write a line to stderr that begins with our name, as others may see the line."""
    tell(f"ddplaunch: {text}\n")


def call_or_report(call: Callable[[], object], failed: Callable[[str], None]) -> None:
    """Call what a job can do without: what fails in it, such as files of another version, goes to `failed` and ends no job."""
    try:
        call()
    except Exception as error:  # noqa: BLE001
        failed(f"{type(error).__name__}: {error}")
