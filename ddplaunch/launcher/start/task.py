"""Main of an agent in a Slurm step that ddplaunch has started: `python -m ddplaunch.launcher.start.task`, its order in variables.

The order is complete: variables and files were read where the command was typed.
"""

from __future__ import annotations

import ddplaunch.system.interrupt  # noqa: F401 - before all else

# isort: split

import gc

gc.disable()  # imports make no garbage, and collecting takes a tenth of the start

import os  # noqa: E402 - as in __main__
import signal  # noqa: E402
import sys  # noqa: E402

# srun ends with the highest status of all tasks: that of the first node is to be the step's, so all other tasks end with 0
_IS_NOT_FIRST_NODE = os.environ.get("SLURM_NODEID") != "0"
if _IS_NOT_FIRST_NODE:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # until the agent takes signals

from ddplaunch.launcher.start import dispatch  # noqa: E402
from ddplaunch.reach.slurm import srun  # noqa: E402
from ddplaunch.spec import order, program  # noqa: E402
from ddplaunch.spec.options.token import ORDER, SCREEN, STDIN  # noqa: E402
from ddplaunch.system.console.streams import Screen  # noqa: E402
from ddplaunch.system.errors import LaunchError, write_stderr  # noqa: E402
from ddplaunch.system.exitcodes import BUG, USAGE  # noqa: E402
from ddplaunch.system.fields import Malformed  # noqa: E402


def main() -> int:
    """Run the agent and return the exit status of its task: a failed job is reported by one task, not by all."""
    try:
        # what srun writes to, as the command said: stdout here is srun's pipe, or a terminal that srun has made
        screen = Screen.of_text(os.environ[SCREEN])
        env = dict(os.environ)
        if name := env.get(STDIN):  # set for a job whose worker reads the command's stdin, where that is on this host
            srun.take_stdin(name)
        try:
            spec = order.from_variables(env).spec()
        except Malformed as error:
            what = f"the order of this step, in the variables {ORDER}0 and on, is damaged ({error})"
            raise LaunchError(what, hint="a prolog of Slurm may have changed them", status=USAGE) from None
        try:
            program.check(spec.program, {**env, **dict(spec.env)}.get("PATH"))  # it need not be on all nodes
        except LaunchError as error:
            is_command_told = dispatch.tell_node_0(
                spec, env, error
            )  # the command coordinates, and answers in its place
            if not is_command_told:
                raise
            return 0 if _IS_NOT_FIRST_NODE else error.status  # the command says why
        status = dispatch.run(spec, env, screen=screen)
        return 0 if _IS_NOT_FIRST_NODE else status
    except LaunchError as error:
        write_stderr(error.render())
        return error.status
    except Exception:  # noqa: BLE001 - whatever it is, it is a bug of ours
        sys.excepthook(*sys.exc_info())
        return BUG


if __name__ == "__main__":
    os._exit(main())  # a normal exit of the interpreter takes longer than the start of a worker
