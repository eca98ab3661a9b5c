"""`ddplaunch report`: makes the page of a run, or its trace, and writes it to a file."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from ddplaunch.record import trace
from ddplaunch.system.errors import LaunchError, say
from ddplaunch.system.process.apart import disk_watch_paused
from ddplaunch.system.process.files import result_file
from ddplaunch.system.redaction import Redactor, literals
from ddplaunch.system.words import count
from ddplaunch.tools.page.history import read
from ddplaunch.tools.page.page import page
from ddplaunch.tools.page.trace import about, entries
from ddplaunch.tools.runs import choice

_NAME = "report.html"  # in the folder of the run
_HINT_OTHER_FILE = "name another file"
_POINTS, _POINTS_OF_TRACE = 300, 1000  # of a curve: on the page, and in a trace


def write(
    env: Mapping[str, str],
    named: str | None,
    *,
    out: str | None,
    trace_file: str | None,
    opens: bool,
    shows_diff: bool = False,
) -> str:
    """Write the page of a run, or only its trace if a file for that is named, and return the path of the file.

    `out` is the file for the page; None: report.html in the folder of the run, for this user alone. `opens` shows the page in a
    browser. `shows_diff` has changes of the code on it even if there are secrets in them, which are hidden.

    Raises:
        LaunchError: there is no such run, or the file cannot be written.
    """
    if trace_file is not None and (opens or out is not None):
        raise LaunchError("--trace FILE writes a trace and no page", hint="leave --open and --out out, or --trace")
    files = (("--out", out), ("--trace", trace_file))
    typed = [word for option, file in files if file is not None for word in (option, file)]
    flags = [flag for flag, is_given in (("--open", opens), ("--diff", shows_diff)) if is_given]
    known, _ = choice.choose_kept(env, named, "report", [*typed, *flags])
    redactor = Redactor(literals(env))
    if (run := read(known.folder, _POINTS if trace_file is None else _POINTS_OF_TRACE, redactor)) is None:
        raise LaunchError(f"{known.folder} holds no events of a run", hint="`ddplaunch ps --all` lists your runs")
    for problem in run.problems:
        say(f"warning: {problem[:1].lower()}{problem[1:].rstrip('.')}")
    if trace_file is not None:
        path = os.path.abspath(trace_file)
        with result_file(path, _HINT_OTHER_FILE, may_be_pipe=True) as file:
            trace.write(file, entries(run), about(run), packed=path.endswith(".gz"))
        return path
    path = os.path.abspath(out or f"{known.folder}/{_NAME}")
    made = page(run, time.time(), redactor, shows_diff=shows_diff)
    with result_file(path, _HINT_OTHER_FILE, private=out is None, may_be_pipe=out is not None) as file:
        file.write(made.encode(errors="replace"))
    if redactor.hidden:
        say(f"{count(redactor.hidden, 'value')} hidden")
    if opens:
        import webbrowser  # few calls open one

        with disk_watch_paused():  # some show the page before they return
            has_opened = webbrowser.open(f"file://{path}")
        if not has_opened:
            say("no browser was found: open the file yourself")
    return path
