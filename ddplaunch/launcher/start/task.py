"""An agent in a step that ddplaunch has started: `python -m ddplaunch.launcher.start.task OPTION... -- PROGRAM`.

Each OPTION is JSON. They are complete: variables and files were read where the command was typed.
"""

from __future__ import annotations

import ddplaunch.system.interrupt  # noqa: F401 - before all else

# isort: split

import gc

gc.disable()  # imports make no garbage, and collecting takes a tenth of the start

import json  # noqa: E402 - as in __main__
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402

_IS_OTHER = os.environ.get("SLURM_NODEID") != "0"  # not node 0, whose status is that of the step
if _IS_OTHER:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # until the agent takes signals

from collections.abc import Mapping, Sequence  # noqa: E402

from ddplaunch.launcher.start import dispatch  # noqa: E402
from ddplaunch.reach.slurm import stdin  # noqa: E402
from ddplaunch.reach.slurm.srun import unescaped  # noqa: E402
from ddplaunch.spec import program  # noqa: E402
from ddplaunch.spec.job import Given, JobSpec  # noqa: E402
from ddplaunch.spec.options.resolve import received  # noqa: E402
from ddplaunch.spec.options.token import OPTIONS, SCREEN, STDIN, unhidden  # noqa: E402
from ddplaunch.system.console.streams import Screen  # noqa: E402
from ddplaunch.system.errors import LaunchError, write_stderr  # noqa: E402
from ddplaunch.system.exitcodes import BUG  # noqa: E402


def spec_of(argv: Sequence[str], env: Mapping[str, str]) -> JobSpec:
    """Return the job from the arguments that `run_step` has written, and the options and variables that it has hidden."""
    words = unescaped(argv)
    end = words.index("--")
    apart = json.loads(env.get(OPTIONS, "[]"))
    given = [Given.from_fields(fields) for fields in (*map(json.loads, words[:end]), *apart)]
    return received(given, words[end + 1 :], unhidden(env))


def main() -> int:
    """Run the agent and return the exit status of its task: a failed job is reported by one task, not by all."""
    try:
        # srun may have given this process a terminal, wherever it writes itself
        screen = Screen.of_text(os.environ[SCREEN])
        env = dict(os.environ)
        if name := env.get(STDIN):
            stdin.take(name)
        spec = spec_of(sys.argv[1:], env)
        try:
            program.check(spec.program, {**env, **dict(spec.env)}.get("PATH"))  # it need not be on all nodes
        except LaunchError as error:
            if not dispatch.give_up(spec, env, error):
                raise
            return 0 if _IS_OTHER else error.status  # the command says why
        status = dispatch.run(spec, env, screen=screen)
        return 0 if _IS_OTHER else status
    except LaunchError as error:
        write_stderr(error.render())
        return error.status
    except Exception:  # noqa: BLE001 - whatever it is, it is a bug of ours
        sys.excepthook(*sys.exc_info())
        return BUG


if __name__ == "__main__":
    os._exit(main())  # a normal exit of the interpreter takes longer than the start of a worker
