"""An agent in a step that ddplaunch has started: `python -m ddplaunch.launcher.task OPTION... -- PROGRAM`.

Each OPTION is JSON. They are complete: variables and files were read where the command was typed.
"""

from __future__ import annotations

import ddplaunch.interrupt  # noqa: F401 - before all else

# isort: split

import gc

gc.disable()  # imports make no garbage, and collecting takes a tenth of the start

import json  # noqa: E402 - as in __main__
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Mapping, Sequence  # noqa: E402

from ddplaunch.errors import LaunchError, write_stderr  # noqa: E402
from ddplaunch.exitcodes import BUG  # noqa: E402
from ddplaunch.launcher import dispatch  # noqa: E402
from ddplaunch.options.resolve import received  # noqa: E402
from ddplaunch.options.token import SCREEN, unhidden  # noqa: E402
from ddplaunch.output.streams import Screen  # noqa: E402
from ddplaunch.slurm.srun import unescaped  # noqa: E402
from ddplaunch.spec import Given, JobSpec  # noqa: E402


def spec_of(argv: Sequence[str], env: Mapping[str, str]) -> JobSpec:
    """Return the job from the arguments that `run_step` has written, and the workers' variables that it has hidden."""
    words = unescaped(argv)
    end = words.index("--")
    given = (Given.from_fields(json.loads(word)) for word in words[:end])
    return received(given, words[end + 1 :], unhidden(env))


def main() -> int:
    """Run the agent and give the exit status of its task: if the job failed, one task reports it, not each of them."""
    try:
        # srun may have given this process a terminal, wherever it writes itself
        screen = Screen.of_text(os.environ[SCREEN])
        status = dispatch.run(spec_of(sys.argv[1:], os.environ), dict(os.environ), screen=screen)
        return status if os.environ.get("SLURM_NODEID") == "0" else 0
    except LaunchError as error:
        write_stderr(error.render())
        return error.status
    except Exception:  # noqa: BLE001 - whatever it is, it is a bug of ours
        sys.excepthook(*sys.exc_info())
        return BUG


if __name__ == "__main__":
    os._exit(main())  # a normal exit of the interpreter takes longer than the start of a worker
