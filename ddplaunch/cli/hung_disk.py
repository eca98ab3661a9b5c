"""What a verb that looks into runs says when their disk does not answer, and its exit status."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial

from ddplaunch.record.folders import runs_folder
from ddplaunch.system.console.streams import use_colour
from ddplaunch.system.errors import LaunchError, coloured, write_stderr
from ddplaunch.system.exitcodes import NOT_WRITTEN
from ddplaunch.system.process.ask import AskedEnded, ask

_WITHIN = 1.0  # seconds
_OTHERS = (
    "`export XDG_STATE_HOME=FOLDER`, or `--log-dir FOLDER`, has new jobs keep their runs on another disk; a job that runs goes "
    "on, and SIGTERM to its command stops it"
)


def end(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Print which folder does not answer, and return the exit status; `argv` is the verb and its arguments."""
    named = [os.path.abspath(word) for word in argv[1:] if os.sep in word and not word.startswith("-")]
    folders = [*named, *filter(None, [runs_folder(env)])]
    # a disk may answer some requests and not others
    silent = next((folder for folder in folders if not _answers(folder)), folders[0] if folders else os.curdir)
    error = LaunchError(
        f"`ddplaunch {argv[0]}` has given up: the disk of {silent} does not answer", hint=_OTHERS, status=NOT_WRITTEN
    )
    text = error.render()
    write_stderr(coloured(text) if use_colour(env, os.isatty(2)) else text)
    return error.status


def _answers(folder: str) -> bool:
    """Whether the disk of a folder answers in time, be it that there is no such folder."""
    try:
        ask(partial(os.listdir, folder), _WITHIN)
    except TimeoutError:
        return False
    except (OSError, AskedEnded):
        pass
    return True
