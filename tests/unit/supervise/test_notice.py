from functools import partial
from signal import SIGABRT, SIGINT, SIGKILL, SIGSEGV, SIGTERM, SIGUSR1
from typing import Any

import pytest

from ddplaunch.launcher.decide.first_failure import all_exited_after
from ddplaunch.spec.outcome import WorkerError
from tests.unit.builders import worker_exit

end = partial(worker_exit, at=2.0)


def error(kind: str, message: str = "", at: float = 1.9) -> WorkerError:
    return WorkerError(type=kind, message=message, traceback="", at=at)


STOPPED = {"stopped_with": SIGTERM, "stopped_at": 1.5}
LOST = error("RuntimeError", "[x/gloo/transport/tcp/pair.cc:1] Connection closed by peer")

LEFT: dict[str, dict[str, Any]] = {
    "it saved and ended with 0": {"code": 0},
    "it died of the notice": {"signal": SIGUSR1},
    "its shell died of the notice": {"code": 138},
    "it died of the SIGTERM by which Slurm ends jobs": {"signal": SIGTERM},
    "its handler exits with 143": {"code": 143, "error": error("SystemExit", "143")},
    "it was stopped by us, and raised only then": {"code": 1, "error": error("ValueError"), **STOPPED},
    "it was killed at the end of the grace period": {"signal": SIGKILL, "stopped_with": SIGKILL, "stopped_at": 1.5},
    "it lost contact with one that had left": {"code": 1, "error": LOST},
}
FAILED: dict[str, dict[str, Any]] = {
    "it raised": {"code": 1, "error": error("ValueError")},
    "it ended badly without a word": {"code": 3},
    "it crashed": {"signal": SIGSEGV},
    "it gave up while it was being stopped": {"signal": SIGABRT, **STOPPED},
    "it had raised before it was stopped": {"code": 1, "error": error("ValueError", at=1.0), **STOPPED},
    "it had raised before the signal ended it": {"signal": SIGTERM, "error": error("ValueError", at=1.0)},
    "somebody else killed it": {"signal": SIGKILL},
    "Ctrl-C ended it, which is no notice": {"signal": SIGINT},
}


@pytest.mark.parametrize("what", LEFT)
def test_a_worker_has_left_if(what: str) -> None:
    assert all_exited_after([end(code=0), end(**LEFT[what])], SIGUSR1, 0)


@pytest.mark.parametrize("what", FAILED)
def test_a_worker_has_failed_if(what: str) -> None:
    assert not all_exited_after([end(code=0), end(**FAILED[what])], SIGUSR1, 0)


def test_the_signal_that_stopped_the_job_counts_as_the_notice_does() -> None:
    assert all_exited_after([end(signal=SIGINT)], SIGUSR1, SIGINT)
