"""What a verb says when the disk of its files does not answer, and its exit status."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial

from ddplaunch.cli.command import VERBS
from ddplaunch.record.folders import runs_folder
from ddplaunch.spec.program import working_directory
from ddplaunch.system.console.paint import Paint
from ddplaunch.system.console.streams import use_colour
from ddplaunch.system.errors import LaunchError, write_stderr
from ddplaunch.system.exitcodes import NOT_WRITTEN
from ddplaunch.system.process.ask import AskedEnded, ask
from ddplaunch.system.process.files import open_regular

_WITHIN = 1.0  # seconds
_OF_RUNS = (
    "`export XDG_STATE_HOME=FOLDER`, or `--log-dir FOLDER`, has new jobs keep their runs on another disk; a job that runs goes "
    "on, and SIGTERM to its command stops it"
)
_OF_FILES = "`cd` to a folder on a disk that works, and name a script there"


def end(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Print which folder does not answer, and return the exit status; `argv` is the verb and its arguments."""
    named = [os.path.abspath(word) for word in argv[1:] if os.sep in word and not word.startswith("-")]
    others, hint = working_directory(), _OF_FILES
    if VERBS[argv[0]][0] == "running":
        others, hint = runs_folder(env), _OF_RUNS
    places = [*named, others or os.curdir]
    # a disk may answer some requests and not others
    silent = next((place for place in places if not _answers(place)), places[-1])
    error = LaunchError(
        f"`ddplaunch {argv[0]}` has given up: the disk of {silent} does not answer", hint=hint, status=NOT_WRITTEN
    )
    write_stderr(Paint(use_colour(env, os.isatty(2))).report(error.render()))
    return error.status


def _answers(place: str) -> bool:
    """Whether the disk of a file or folder answers in time, be it that there is none."""
    try:
        ask(partial(_read, place), _WITHIN)
    except TimeoutError:
        return False
    except (OSError, AskedEnded):
        pass
    return True


def _read(place: str) -> None:
    if os.path.isdir(place):
        os.listdir(place)
    else:
        with open_regular(place) as file:
            file.read(1)
