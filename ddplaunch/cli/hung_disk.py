"""What a command says when its verb, which runs in a child (`watch_disk` in main.py), hangs with a disk; its exit status."""

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

_ANSWER_WITHIN = 1.0  # seconds that a disk has to answer
_HINT_OF_RUNS = (
    "`export XDG_STATE_HOME=FOLDER`, or `--log-dir FOLDER`, has new jobs keep their runs on another disk; a job that runs goes "
    "on, and SIGTERM to its command stops it"
)
_HINT_OF_FILES = "`cd` to a folder on a disk that works, and name a script there"


def end(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Print which file or folder does not answer, and return the exit status; `argv` is the verb and its arguments.

    These are tried: the paths in the arguments, then the folder of runs if the verb looks into runs, else the working directory.
    """
    named = [os.path.abspath(word) for word in argv[1:] if os.sep in word and not word.startswith("-")]
    module, _purpose = VERBS[argv[0]]
    looks_into_runs = module == "running"
    folder, hint = (runs_folder(env), _HINT_OF_RUNS) if looks_into_runs else (working_directory(), _HINT_OF_FILES)
    places = [*named, folder or os.curdir]
    # all may answer by now, since a disk may answer some requests and not others: then the last one is named
    silent = next((place for place in places if not _answers(place)), places[-1])
    error = LaunchError(
        f"`ddplaunch {argv[0]}` has given up: the disk of {silent} does not answer", hint=hint, status=NOT_WRITTEN
    )
    write_stderr(Paint(use_colour(env, os.isatty(2))).report(error.render()))
    return error.status


def _answers(place: str) -> bool:
    """Whether the disk of a file or folder answers in time, be it that there is none."""
    try:
        ask(partial(_read, place), _ANSWER_WITHIN)
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
