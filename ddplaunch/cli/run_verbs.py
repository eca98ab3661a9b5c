"""The verbs that look into runs: from what click has parsed to a call, and from its errors to ours."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import click

from ddplaunch.cli.commands import NAMES_NO_RUN, RUN_OPTIONS
from ddplaunch.errors import LaunchError, did_you_mean, visible
from ddplaunch.exitcodes import of_signal


def call(
    verb: str,
    parsed: Mapping[str, Any],
    env: Mapping[str, str],
    show: Callable[[str], int],
    write: Callable[[str], None],
) -> int:
    """Carry out a verb; `show` prints to stdout and gives the exit status, `write` writes to stderr."""

    def say(text: str) -> None:
        write(visible(f"ddplaunch: {text}\n"))

    # no verb needs what is of another
    if verb == "stop":
        from ddplaunch.runs import stop

        return stop.stop(env, parsed["run"], say)
    if verb == "logs":
        from ddplaunch.runs import logs

        want = logs.wanted(parsed["ranks"], parsed["grep"], parsed["since"], parsed["follow"], time.time())
        try:
            return logs.show(env, parsed["run"], want, say)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left would fail once more at the end
            return of_signal(signal.SIGPIPE)
    if verb == "stacks":
        from ddplaunch.runs import stacks

        asked = {name: parsed[name] for name in ("ranks", "threads", "native")}
        return show(visible(stacks.show(env, parsed["run"], **asked, as_json=parsed["json"])))
    from ddplaunch.runs import ps

    return show(visible(ps.show(env, as_json=parsed["json"])))


def wrong(verb: str, error: click.UsageError) -> LaunchError:
    """Say what is wrong with the words behind a verb."""
    names = [name for names, _, _ in RUN_OPTIONS[verb] for name in names]
    match error:
        case click.NoSuchOption(option_name=name):
            meant = did_you_mean(name, [*names, "--help"])
            hint = f"did you mean `{meant}`?" if meant else f"ddplaunch {verb} --help"
            return LaunchError(f"{name} is not an option of ddplaunch {verb}", hint=hint)
        case click.BadOptionUsage(option_name=name):
            return LaunchError(f"{name} {_lacks(verb, name)}", hint=f"ddplaunch {verb} --help")
    at_most = "no argument" if verb in NAMES_NO_RUN else "the name of one run"
    return LaunchError(f"ddplaunch {verb} takes {at_most}", hint=f"ddplaunch {verb} --help")


def _lacks(verb: str, name: str) -> str:
    metavar = next((metavar for names, metavar, _ in RUN_OPTIONS[verb] if name in names), "")
    return f"needs a value ({metavar})" if metavar else "takes no value"
