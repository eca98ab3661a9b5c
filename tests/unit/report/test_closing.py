from signal import SIGINT, SIGKILL, SIGQUIT, SIGTERM

from msgspec.structs import replace

from ddplaunch.launcher.tell.closing import render_finished, render_short, render_stopped, render_timeout
from ddplaunch.spec.outcome import WorkerError, WorkerExit
from tests.unit.builders import worker_exit


def end(rank: int, stopped_with: int | None = None, took: float = 0.2) -> WorkerExit:
    stopped = {"stopped_with": stopped_with, "stopped_at": 50.0} if stopped_with else {}
    return worker_exit(rank, 0, stopped_with, at=50.0 + took, **stopped)


def test_a_job_that_finished() -> None:
    assert render_finished(4, 12.34) == "4 workers finished in 12.3 s"
    assert render_finished(1, 7263.0) == "1 worker finished in 2 h 1 min"
    assert render_finished(4, 90, restarts=2) == "4 workers finished in 1 min 30 s after 2 restarts"


def test_a_job_that_a_signal_ended() -> None:
    exits = [end(rank, SIGINT, 0.05 * rank) for rank in range(5)]
    assert render_stopped(SIGINT, 182.0, exits) == (
        "stopped by SIGINT (Ctrl-C) after 3 min 2 s; 5 workers ended in 0.2 s"
    )
    assert render_stopped(SIGQUIT, 1.0, []) == "stopped by SIGQUIT (Ctrl-\\) after 1 s"
    assert render_stopped(SIGTERM, 1.0, [end(0, SIGTERM)]) == "stopped by SIGTERM after 1 s; 1 worker ended in 0.2 s"


def test_those_that_had_to_be_killed_are_named() -> None:
    exits = [end(0, SIGTERM), end(1, SIGKILL, 10.0), end(2, SIGKILL, 10.01)]
    assert render_stopped(SIGTERM, 5.0, exits) == (
        "stopped by SIGTERM after 5 s; 3 workers ended in 10 s, ranks 1-2 by SIGKILL"
    )


def test_workers_that_had_finished_before_are_not_counted() -> None:
    assert render_timeout(7200.0, [end(0), end(1, SIGTERM)]) == (
        "stopped: --timeout of 2 h was reached; 1 worker ended in 0.2 s"
    )


def test_a_short_report_of_a_failure_says_who_failed_how_and_why_it_is_short() -> None:
    failed = replace(
        end(1), code=3, log="/run/1.err", error=WorkerError(type="RuntimeError", message="boom\ntwice", traceback="")
    )
    assert render_short(failed, "ImportError: gone") == (
        "error: rank 1 (pid 101 on node) ended with status 3\n"
        "  RuntimeError: boom\n"
        "  twice\n"
        "  logs /run/1.err\n"
        "  this summary is short, since what writes the full one has failed: ImportError: gone\n"
    )
    killed = replace(end(1), code=None, signal=SIGKILL)
    assert render_short(killed, "").startswith("error: rank 1 (pid 101 on node) was killed by SIGKILL\n")
