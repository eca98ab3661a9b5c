"""What Python still does in a worker whose script has ended: it waits for threads and child processes, and runs `atexit`."""

from __future__ import annotations

from collections.abc import Sequence

from ddplaunch.record.seen import Thread
from ddplaunch.record.seen.stack import is_library, location
from ddplaunch.spec.outcome import Frame

_MOST = 3  # threads that are named
ENDED = "its script has ended, and Python "  # how the sentences begin


def at_exit(threads: Sequence[Thread], cwd: str) -> str:
    """Say what Python waits for: "its script has ended, and Python waits for a thread: train.py:3 in upload"; "" while it runs.

    Which threads are daemons, for which Python does not wait, is not known; those in the program's own code are named first.
    """
    main = next((thread for thread in threads if thread.at_exit), None)
    if main is None:
        return ""
    begun = main.frames[-1]
    if begun.function == "_shutdown" and begun.file.endswith("/threading.py"):
        places = _places([thread for thread in threads if not thread.is_main], cwd)
        named = f": {', '.join(places[:_MOST])}" if places else ""
        return f"{ENDED}waits for {'a thread' if len(places) < 2 else 'threads'}{named}"
    if begun.function == "_exit_function" and begun.file.endswith("/multiprocessing/util.py"):
        return f"{ENDED}waits for its child processes"
    return f"{ENDED}runs a function that was registered for its exit: {location(_shown(main.frames), cwd)}"


def _places(threads: Sequence[Thread], cwd: str) -> list[str]:
    """Return where threads are, each place once: those in the program's own code, else those in libraries."""
    frames = [_shown(thread.frames) for thread in threads if thread.frames]
    own = [frame for frame in frames if not is_library(frame)]
    return list(dict.fromkeys(location(frame, cwd) for frame in own or frames))


def _shown(frames: Sequence[Frame]) -> Frame:
    """Return the innermost frame of the program's own code, else the innermost one."""
    return next((frame for frame in frames if not is_library(frame)), frames[0])
