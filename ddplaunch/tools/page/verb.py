"""`ddplaunch report`: makes the page of a run, or its trace, and writes it to a file."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping

from ddplaunch.system.errors import LaunchError
from ddplaunch.system.process.apart import waiting
from ddplaunch.system.process.files import replaced
from ddplaunch.system.redaction import Redactor, literals
from ddplaunch.system.words import count, why_failed
from ddplaunch.tools.page.history import read
from ddplaunch.tools.page.page import page
from ddplaunch.tools.page.trace import trace
from ddplaunch.tools.runs import find

_NAME = "report.html"  # in the folder of the run
_POINTS, _TRACED = 300, 1000  # points of a curve on the page, and in a trace


def write(
    env: Mapping[str, str],
    named: str | None,
    say: Callable[[str], None],
    *,
    out: str | None,
    trace_file: str | None,
    opens: bool,
    shows_diff: bool = False,
) -> str:
    """Write the page of a run, or only its trace if a file for that is named, and return where.

    `say` writes a line to stderr, `opens` shows the page in a browser, `shows_diff` has changes of the code on it in which
    something is hidden.

    Raises:
        LaunchError: there is no such run, or the file cannot be written.
    """
    if trace_file is not None and (opens or out is not None):
        raise LaunchError("--trace FILE writes a trace and no page", hint="leave --open and --out out, or --trace")
    known, _ = find.kept(env, named, "report")
    if known.keeps_elsewhere:
        hint = f"type `ddplaunch report {known.name}` there"
        raise LaunchError(f"the folder of {known.name} is on the hosts of its nodes", hint=hint)
    redactor = Redactor(literals(env))
    if (run := read(known.folder, _POINTS if trace_file is None else _TRACED, redactor)) is None:
        raise LaunchError(f"{known.folder} holds no events of a run", hint="`ddplaunch logs` names your latest run")
    for problem in run.problems:
        say(f"warning: {problem[:1].lower()}{problem[1:].rstrip('.')}")
    if trace_file is not None:
        path = os.path.abspath(trace_file)
        _put(path, trace(run), private=False)
        return path
    path = os.path.abspath(out or f"{known.folder}/{_NAME}")
    _put(path, page(run, time.time(), redactor, shows_diff=shows_diff), private=out is None)
    if redactor.hidden:
        say(f"{count(redactor.hidden, 'value')} hidden")
    if opens:
        import webbrowser  # few calls open one

        with waiting():  # some show the page before they return
            has_opened = webbrowser.open(f"file://{path}")
        if not has_opened:
            say("no browser was found: open the file yourself")
    return path


def _put(path: str, text: str, *, private: bool) -> None:
    """Write a file as a whole; in the folder of a run, a link in its place is not followed, and a pipe is not waited for."""
    data = text.encode(errors="replace")
    try:
        if private and os.path.islink(path):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        if not private and os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
            with waiting(), open(path, "wb") as pipe:  # or a terminal, as /dev/stdout is; its reader may come late
                pipe.write(data)
            return
        with replaced(path, 0o600 if private else 0o666) as file:
            file.write(data)
    except OSError as error:
        raise LaunchError(f"cannot write {path}: {why_failed(error)}", hint="name another file") from None
