"""The folders of runs: how a run is called, where the folders lie, how one is made, which of them are of runs that go on.

A run has the name that was asked for, or date, time and a short name, which is what people see and type.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count

from ddplaunch.spec.job import JobSpec
from ddplaunch.system.process.files import open_regular

BAD_NODES = "the list of nodes that have failed"  # what an error calls `bad_nodes_file`
NODE_FOLDER_PREFIXES = ("node-", "rank-")  # what the names of such folders begin with

_BEGAN = "%Y%m%d-%H%M%S"
# no vowel, so that no name is a word; no w, so that none ends in `pw`, beside which a value is taken for a password; none of
# 0, 1, l, which look like others. The first is a letter: a number is a rank
_LETTERS, _LENGTH = "bcdfghjkmnpqrstvxz", 4
_CHARACTERS = f"{_LETTERS}23456789"
_MADE = re.compile(r"\d{8}-\d{6}-(?P<short>[a-z0-9]{3,4}(?:\.\d+)?)")


def run_id_of(spec: JobSpec) -> str:
    """Return the name of this run: as was asked, or "20261123-194501-k7qx", in which one of 316,000 short names is drawn."""
    first, *others = os.urandom(_LENGTH)
    drawn = _LETTERS[first % len(_LETTERS)] + "".join(_CHARACTERS[byte % len(_CHARACTERS)] for byte in others)
    return spec.run_id or f"{time.strftime(_BEGAN)}-{drawn}"


def short(run_id: str) -> str:
    """Return what people see and type of a name: "k7qx" of "20261123-194501-k7qx"; all of one that was asked for."""
    found = _MADE.fullmatch(run_id)
    return found["short"] if found else run_id


def state_folder(env: Mapping[str, str]) -> str | None:
    """Return the folder in which programs of this user keep what is to last; None if the user has no home."""
    state = env.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # which the XDG standard says to ignore
        home = env.get("HOME", "")
        if not home:
            import pwd  # most environments say it; expanduser() would take an empty HOME for the root folder

            with suppress(KeyError):
                home = pwd.getpwuid(os.getuid()).pw_dir
        state = os.path.join(home, ".local", "state")
    return state if os.path.isabs(state) else None


def runs_folder(env: Mapping[str, str]) -> str | None:
    """Return the folder of all runs of this user that have no --log-dir; None if the user has no home."""
    state = state_folder(env)
    return None if state is None else os.path.join(state, "ddplaunch", "runs")


def bad_nodes_file(env: Mapping[str, str]) -> str:
    """Return where nodes of this user are remembered whose machine has failed; "" if the user has no home."""
    state = state_folder(env)
    return "" if state is None else f"{state}/ddplaunch/nodes.jsonl"


def make(root: str, name: str) -> tuple[str, int, int]:
    """Make the folder `name` below `root`, or one with a number behind its name if a run has it, and its events.jsonl.

    Return its path, and descriptors of the folder and of the file: nobody can put another folder in the place of a descriptor.

    Raises OSError.
    """
    make_all(root)
    for number in count():
        path = f"{root}/{name}.{number}" if number else f"{root}/{name}"
        is_new = False
        with suppress(FileExistsError):  # a node of this run may have made it on its way to a folder of its own
            os.mkdir(path, 0o700)
            is_new = True
        try:
            return path, *_claim_by_new_events(path)
        except OSError as error:
            # a folder that was there may be of another run, or no folder; in a new one, another run may have been quicker
            is_taken = not is_new or isinstance(error, FileExistsError)
            if not is_taken:
                raise
    raise AssertionError


def _claim_by_new_events(path: str) -> tuple[int, int]:
    """Return descriptors of a folder that no run has yet, and of its new events.jsonl, which makes the folder that of this run.

    Raises OSError: a run has it, or the disk takes no file.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        new = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return folder, os.open("events.jsonl", new, 0o600, dir_fd=folder)
    except OSError:
        os.close(folder)
        raise


def make_all(path: str) -> None:
    """Make this folder, its owner's alone, and those above it, in which no other user may put another in its place.

    Raises OSError.
    """
    before = os.umask(0o022)  # for those above; the mode is for the last one
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    finally:
        os.umask(before)


def replaceable_by(path: str) -> str | None:
    """Return which other user may replace this folder, and where; None: only you and root may.

    The owner of a folder above may rename what lies in it. So may every user if all may write to it, unless it has the sticky
    bit, as /tmp has. Members of its group were let in on purpose. Where `path` leads through links, the folders above both count.

    Raises OSError.
    """
    own = {os.getuid(), 0, *unknown_owners()}
    for start in dict.fromkeys((path, os.path.realpath(path))):
        above = start
        while above != (above := os.path.dirname(above)):
            found = os.stat(above)
            if found.st_uid not in own:
                return f"user {found.st_uid} may: {above} is theirs"
            if found.st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
                return f"any user may: {above} has no sticky bit (chmod +t)"
    return None


def unknown_owners() -> list[int]:
    """Return the overflow uid in a container: files of all users that the container does not know have it. [] outside of one.

    A folder of that uid may belong to any user of the host, so its owner says nothing. See user_namespaces(7).
    """
    try:
        with (
            open("/proc/self/uid_map", encoding="ascii") as file,
            open("/proc/sys/fs/overflowuid", encoding="ascii") as uid,
        ):
            mapped = int(file.read().split()[2])  # how many uids the first line maps; outside of a container, all
            return [] if mapped == 2**32 - 1 else [int(uid.read())]
    except (OSError, ValueError, IndexError):
        return []


def lock(events: int) -> None:
    """Show others that the run goes on, for as long as any process of ours has this file open."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(events, fcntl.LOCK_EX | fcntl.LOCK_NB)


def node_folders_of(run: str) -> list[str]:
    """Return the folders of a run that hold events: its own, if it has any, and those of its nodes, by node rank."""
    try:
        with os.scandir(run) as entries:
            named = [entry for entry in entries if entry.name.startswith(NODE_FOLDER_PREFIXES)]
            of_nodes = [entry.path for entry in named if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return [run]
    has_own_events = os.path.exists(f"{run}/events.jsonl")
    own = [run] if has_own_events or not of_nodes else []
    return [*own, *sorted(of_nodes, key=_by_number)]


def _by_number(node_folder: str) -> tuple[list[int], str]:
    """Return what sorts node-2 before node-10."""
    return [int(number) for number in re.findall(r"\d{1,9}", os.path.basename(node_folder))], node_folder


def goes_on(run: str) -> bool:
    """Whether the run in this folder has not ended."""
    return any(_is_written(node_folder, for_sure=False) for node_folder in node_folders_of(run))


def first_that_goes_on(run: str) -> str | None:
    """Return the folder of the first node whose agent still runs; None, too, where the file system has no locks to tell by."""
    return next((node_folder for node_folder in node_folders_of(run) if _is_written(node_folder, for_sure=True)), None)


def _is_written(node_folder: str, *, for_sure: bool) -> bool:
    """Whether the agent that writes the events in this folder still runs, which it shows by a lock (`lock`).

    Where the file system has no locks: False if it is to be known `for_sure`, else whether the end of the job is not written yet.
    """
    file = f"{node_folder}/events.jsonl"
    try:
        events = open_regular(file)
    except OSError:
        return False
    with events:
        try:
            fcntl.flock(events, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks
            return not for_sure and not os.path.exists(f"{os.path.dirname(file)}/summary.json")
    return False
