"""The verbs that look into runs: from their arguments to a call, and what is wrong with those."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from ddplaunch.cli.parser import GivenTwice, NoSuchOption, WrongValue
from ddplaunch.cli.verbs import NAMES_NO_RUN, RUN_OPTIONS
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
    if len(parsed["program"]) > (0 if verb in NAMES_NO_RUN else 1):
        at_most = "no argument" if verb in NAMES_NO_RUN else "the name of one run"
        raise LaunchError(f"ddplaunch {verb} takes {at_most}", hint=f"ddplaunch {verb} --help")
    run = next(iter(parsed["program"]), None)

    def say(text: str) -> None:
        write(visible(f"ddplaunch: {text}\n"))

    # no verb needs what is of another
    if verb == "stop":
        from ddplaunch.runs import stop

        return stop.stop(env, run, say)
    if verb == "attach":
        from ddplaunch.runs import attach

        return attach.attach(env, run, parsed.get("rank"), say)
    if verb == "logs":
        from ddplaunch.runs import logs

        want = logs.wanted(
            parsed.get("ranks"), parsed.get("grep"), parsed.get("since"), "follow" in parsed, time.time()
        )
        try:
            return logs.show(env, run, want, say)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left would fail once more at the end
            return of_signal(signal.SIGPIPE)
    if verb == "stacks":
        from ddplaunch.runs import stacks

        asked = {name: name in parsed for name in ("threads", "native")}
        return show(stacks.show(env, run, ranks=parsed.get("ranks"), **asked, as_json="json" in parsed))
    if verb == "warm":
        from ddplaunch.warm import show as warm

        return show(warm.show(env, stop="stop" in parsed))
    from ddplaunch.runs import ps

    return show(ps.show(env, as_json="json" in parsed))


def wrong(verb: str, error: NoSuchOption) -> LaunchError:
    """Say what is wrong with an option of a verb."""
    name = error.name
    if isinstance(error, WrongValue):
        return LaunchError(f"{name} {_lacks(verb, name)}", hint=f"ddplaunch {verb} --help")
    if isinstance(error, GivenTwice):
        is_list = _metavar(verb, name) == "LIST"
        names = ", ".join(next(names for names, _, _ in RUN_OPTIONS[verb] if name in names))
        return LaunchError(
            f"{names} is given twice", hint=f"give all in one list: `{name} 0,4`" if is_list else "give it once"
        )
    meant = did_you_mean(name, [*(name for names, _, _ in RUN_OPTIONS[verb] for name in names), "--help"])
    hint = f"did you mean `{meant}`?" if meant else f"ddplaunch {verb} --help"
    return LaunchError(f"{name} is not an option of ddplaunch {verb}", hint=hint)


def _lacks(verb: str, name: str) -> str:
    metavar = _metavar(verb, name)
    return f"needs a value ({metavar})" if metavar else "takes no value"


def _metavar(verb: str, name: str) -> str:
    return next((metavar for names, metavar, _ in RUN_OPTIONS[verb] if name in names), "")
