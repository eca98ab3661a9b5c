"""`ddplaunch stop`: ends a running job as Ctrl-C in its terminal does, and waits until it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from ddplaunch.control import requests
from ddplaunch.errors import LaunchError, below
from ddplaunch.exitcodes import NODE_LOST, OK
from ddplaunch.fields import Malformed
from ddplaunch.runs import client, find
from ddplaunch.runs.known import heading
from ddplaunch.words import duration

_FIRST_REPLY = 5.0  # seconds
_SENT = 0.2


def stop(env: Mapping[str, str], named: str | None, write: Callable[[str], None]) -> int:
    """Stop the job that is meant, say on stderr by `write` what comes of it, and give the exit status.

    Raises:
        LaunchError: it is not clear which job is meant, or it does not answer.
    """
    chosen = find.choose(env, named, "stop")
    name, began = chosen.name, time.monotonic()
    assert chosen.replies is not None
    try:
        with client.connect(chosen.replies.place) as sock:
            # who has not answered just now is asked to stop all the same, and does so when it can
            within = _FIRST_REPLY if chosen.replies.run is not None else _SENT
            for reply in client.replies_of(sock, requests.StopRun(), within):
                match reply:
                    case requests.Run():
                        write(f"stopping {heading(chosen)}, as Ctrl-C does; Ctrl-C here only ends the waiting")
                    case requests.RunEnded(status):
                        write(f"{name} has ended with status {status}, {duration(time.monotonic() - began)} later")
                        return OK
                    case requests.RequestRefused(reason):
                        raise LaunchError(f"run {name} does not take the request: {below(reason)}")
    except (TimeoutError, BlockingIOError):
        raise LaunchError(
            f"run {name} does not answer: its agent is stopped, or hangs",
            hint="send SIGTERM to the command that started it; a second one kills the job",
            status=NODE_LOST,
        ) from None
    except Malformed as error:
        raise LaunchError(f"run {name} answers what this version does not understand: {error}") from None
    except OSError:
        pass  # it ended at this very moment
    write(f"{name} has ended; its status is not known")
    return OK
