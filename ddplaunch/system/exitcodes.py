"""The exit statuses of the command: one table, from which `--help-all`, `help exit-codes` and the pages are made."""

from __future__ import annotations

OK = 0
NOT_WRITTEN = 1
USAGE = 2
NO_PROGRESS = 120
RENDEZVOUS = 121
NODE_LOST = 122
HANG = 123
TIMEOUT = 124
BUG = 125
NOT_EXECUTABLE = 126
NOT_FOUND = 127

MEANINGS: dict[str, str] = {
    "0": "every worker exited with 0",
    "1-119": "the first failing worker's own status. 1 too if all workers exited with 0 and their output could not be written",
    str(USAGE): "wrong usage, and nothing was started",
    str(NO_PROGRESS): "no new step in as many generations in a row as --max-no-progress allows",
    str(RENDEZVOUS): "too few nodes joined before the first start, within --rdzv-timeout",
    str(NODE_LOST): "a node, or the agent on it, was lost",
    str(HANG): "no worker had moved for --hang-timeout",
    str(TIMEOUT): "--timeout was reached",
    str(BUG): "a bug in ddplaunch",
    str(NOT_EXECUTABLE): "the program cannot be executed",
    str(NOT_FOUND): "the program was not found",
    "128+n": "signal n ended the first failing worker, or the job (130 Ctrl-C, 143 SIGTERM), "
    "or all workers exited after signal n of --requeue-on or of a notice",
}


def of_signal(signum: int) -> int:
    """The status a shell shows for a process that signal `signum` ended."""
    return 128 + signum
