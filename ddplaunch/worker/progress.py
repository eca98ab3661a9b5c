"""Writes how far a script is, as it says or as its Trainer knows, into a file in memory that the agent reads when asked.

A call costs one write to that file. It sends nothing, wakes nobody, and does nothing without ddplaunch. Imports no torch.
"""

from __future__ import annotations

import json
import operator
import os
import time
from typing import Any, SupportsFloat, SupportsIndex

_FOLDER_PREFIX = "ddplaunch-errors-"  # of the folder in which the agent looks, see spec/error_file.py
_METRICS_AGE = 0.2  # seconds; to read a metric of a GPU waits for its kernels
_MOST_METRICS = 16
_LONGEST_NAME = 40  # characters
_file: _ProgressFile | None = None


def progress(step: SupportsIndex, total: SupportsIndex | None = None, /, **metrics: SupportsFloat) -> None:
    """Tell ddplaunch how far this worker is: `step` steps are done, of `total` if that is known.

    `ddplaunch ps`, `ddplaunch top` and the run's `summary.json` show it, with the metrics: `progress(step, 1000, loss=loss)`.
    Call it once a step in any worker, in rank 0 alone if you like; `step` counts from the beginning of the training, so
    that a restart from a checkpoint continues the count. Metrics are converted by `float()`, at most five times a second.

    Under plain `python` or torchrun the call does nothing.

    Raises:
        ValueError: `step` or `total` is negative.
        TypeError: `step` or `total` is no whole number, or a metric is no number.
    """
    global _file
    done, most = operator.index(step), None if total is None else operator.index(total)
    if done < 0 or (most is not None and most < 0):
        raise ValueError(f"progress({done}, {most}): steps are counted from 0")
    if _file is None:
        _file = _ProgressFile(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    _file.write(done, most, metrics)


class _ProgressFile:
    """The file of one worker: a line of JSON, which each call overwrites."""

    def __init__(self, error_file: str, suffix: str = "progress") -> None:
        """Make the file beside the worker's error file, if that is one of ddplaunch's; `suffix` ends its name."""
        self._pid = os.getpid()
        self._fd = -1
        self._first: tuple[int, float] | None = None  # step and time of the first call
        self._metrics: dict[str, float] = {}
        self._converted_at = -_METRICS_AGE  # when the metrics were converted last: monotonic seconds
        self._size = 0  # bytes of the longest line so far
        self.step = 0  # that was written last
        folder = os.path.basename(os.path.dirname(error_file))
        if folder.startswith(_FOLDER_PREFIX):  # torchrun sets the variable, too, with a folder of its own
            path = f"{error_file.removesuffix('.json')}.{suffix}"
            try:
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError:  # no room: nobody sees how far it is, and the training goes on
                pass

    def write(self, step: int, total: int | None, metrics: dict[str, SupportsFloat]) -> None:
        """Write how far the worker is. A forked child of the worker, such as a data loader's, writes nothing."""
        if self._fd < 0 or os.getpid() != self._pid:
            return
        self.step = step
        now = time.monotonic()
        if self._first is None:
            self._first = step, now
        if now - self._converted_at >= _METRICS_AGE:
            first_metrics = list(metrics.items())[:_MOST_METRICS]
            self._metrics = {name[:_LONGEST_NAME]: float(value) for name, value in first_metrics}
            self._converted_at = now
        line = json.dumps(
            {"step": step, "total": total, "at": now, "first": self._first, "metrics": self._metrics}
        ).encode()
        self._size = max(self._size, len(line))  # spaces cover the end of a longer line that was written before
        try:
            os.pwrite(self._fd, line.ljust(self._size), 0)
        except OSError:
            pass


def follow_trainer(trainer: Any, error_file: str) -> None:
    """Have every Trainer of transformers say how far it is; `trainer` is the module `transformers.trainer`.

    Transformers adds the classes in DEFAULT_CALLBACKS to each Trainer that is made.
    """
    file = _ProgressFile(error_file, "trainer")

    class Progress(trainer.TrainerCallback):  # type: ignore[misc]  # a class of a module that is not imported here
        """Writes each step of rank 0, with the metrics that were logged last."""

        def __init__(self) -> None:
            self.metrics: dict[str, SupportsFloat] = {}

        def on_log(self, _args: Any, _state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
            """Keep the metrics."""
            self.metrics = {name: value for name, value in (logs or {}).items() if isinstance(value, (int, float))}

        def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            """Say how far it is."""
            if state.is_world_process_zero:
                file.write(state.global_step, max(0, state.max_steps) or None, self.metrics)

    trainer.DEFAULT_CALLBACKS.append(Progress)
