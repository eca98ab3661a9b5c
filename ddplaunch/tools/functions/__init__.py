"""Functions as jobs: `launch(function, ...)` runs a function in several workers and returns what each of them returned.

The workers are those of the command, with the same plan, supervision and reports. Here is only how the function gets to them
and how the results come back; it supervises no worker and imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ddplaunch.system.errors import LaunchError

T = TypeVar("T")

MAX_RESULT_BYTES = 1 << 30


def launch(
    function: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    nproc_per_node: int | str | None = None,
    max_result_bytes: int = MAX_RESULT_BYTES,
    **options: Any,
) -> list[T]:
    """Run `function(*args, **kwargs)` in several workers of this machine; return what each returned, in the order of ranks.

    Each worker is a process of its own with the variables of a rank, so `torch.distributed.init_process_group()` works in it.
    `nproc_per_node` is how many: not given, one for each GPU, one if there is none. `options` are those of the command, with
    _ for -: `timeout=60`, `env={"NCCL_DEBUG": "INFO"}`, `output="rank0"`, `simulate=True`.

    CPU tensors in the arguments are shared with the workers, results come back by value. What workers print goes to
    `sys.stdout` and `sys.stderr`. When it returns or raises, no process of the job is left.

    Raises:
        WorkerFailed: a worker failed; it is of the type of the exception that the function raised, too.
        JobTimeout: `timeout` was reached.
        JobError: the job could not be run.
        ValueError: an option has a wrong value, or two do not go together.
        TypeError: there is no such option, or the function or an argument cannot be sent.
    """
    _refuse_in_worker()
    # what a type checker would refuse, and what it cannot see
    if not callable(function):
        raise TypeError(f"launch() needs a function, not {type(function).__name__}")
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise TypeError(f"launch(): args={args!r}: expected a tuple or a list, not {type(args).__name__}")
    if not isinstance(max_result_bytes, int) or max_result_bytes < 1:
        raise ValueError(f"max_result_bytes={max_result_bytes!r}: expected a number from 1")
    from ddplaunch.spec import call as request
    from ddplaunch.spec.program import working_directory
    from ddplaunch.tools.functions.caller import Caller
    from ddplaunch.tools.functions.exceptions import JobError
    from ddplaunch.tools.functions.pickling import CannotSend, Function, name_of

    try:
        given = request.given({"nproc_per_node": nproc_per_node, **options}, os.environ, working_directory())
        spec = request.spec_of(given, name_of(function))
    except LaunchError as error:
        raise ValueError(error.message + (f"; {error.hint}" if error.hint else "")) from None
    try:
        sent = Function(function, args, kwargs or {})
        return Caller(sent, given, spec, result_limit=max_result_bytes).run()
    except JobError as error:
        # how we got here explains nothing; the traceback of a worker is in the notes
        raise error.with_traceback(None) from error.__cause__
    except KeyboardInterrupt as interruption:
        raise interruption.with_traceback(None) from None  # where launch() was called, not in our loop
    except CannotSend as error:
        raise TypeError(str(error)) from error.__cause__


def _refuse_in_worker() -> None:
    """Refuse to start a job inside a worker of another job."""
    from multiprocessing import process

    if getattr(process.current_process(), "_inheriting", False):
        raise RuntimeError(
            "launch() was called while a worker imported the main module; every worker imports it to find the function. "
            'Put the call under `if __name__ == "__main__":`'
        )
    if "DDPLAUNCH_RUN_ID" in os.environ:
        raise RuntimeError(
            f"launch() was called in a worker (rank {os.environ.get('RANK', '?')} of job {os.environ['DDPLAUNCH_RUN_ID']}); "
            "a job cannot start another one"
        )
