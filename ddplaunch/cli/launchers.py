"""Translates command lines of other launchers, torchrun to horovodrun, into ddplaunch's, for hints. Looks at files only."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ddplaunch.spec.options.table import ALIAS_OF, ALIASES, BY_NAME, OPTIONS, Option
from ddplaunch.system.errors import LaunchError

if TYPE_CHECKING:
    from ddplaunch.plan.cluster.hostlist import Host

_NPROC_FLAG = "--nproc-per-node"
PYTHON = re.compile(r"python(\d(\.\d+)?)?")
# all flags of a job; None: one that every verb has
OPTION_BY_FLAG: Mapping[str, Option | None] = {
    **{option.flag: option for option in OPTIONS},
    **{option.short: option for option in OPTIONS if option.short},
    **{alias.flag: BY_NAME[alias.option] for alias in ALIASES},
    **dict.fromkeys(("--help", "--help-all", "--version")),
}
# options of other launchers, and ours of the same meaning, besides those of ALIASES; None: nothing has to be said here
_OUR_FLAGS = {alias.flag: BY_NAME[alias.option].flag for alias in ALIASES}
_MPIRUN = {"-H": "--hosts", "--host": "--hosts", "-x": "--env", "--allow-run-as-root": None, "--oversubscribe": None}
_LAUNCH = {"--use-env": None}
_DEEPSPEED = {"--no-local-rank": None, "--no-ssh": None}
LAUNCHERS: Mapping[str, Mapping[str, str | None]] = {
    "torchrun": _LAUNCH,
    "torch.distributed.run": _LAUNCH,
    "torch.distributed.launch": _LAUNCH,
    "accelerate": {"--multi-gpu": None},
    "accelerate.commands.launch": {"--multi-gpu": None},
    "deepspeed": _DEEPSPEED,
    "deepspeed.launcher.runner": _DEEPSPEED,
    "mpirun": _MPIRUN,
    "mpiexec": _MPIRUN,
    "horovodrun": _MPIRUN,
}


def translate_line(name: str, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Translate the words behind the name of another launcher: return those for ddplaunch, and the options without a counterpart.

    Both are empty if the words name no script.
    """
    words = list(words)
    if name == "accelerate" and words[:1] == ["launch"]:
        del words[0]
    end = first_script(words)
    if end is None:
        return [], []
    meant, lost = list[tuple[str, str]](), list[str]()  # our flags with their values; words
    total = 0  # workers of all nodes, where the launcher counts them so
    at = 0
    while at < end:
        word = words[at]
        _, equals, value = word.partition("=")
        flag = flag_of(word)
        # None: nothing has to be said in its place; "": it has no counterpart
        ours = LAUNCHERS[name].get(flag, _OUR_FLAGS.get(flag, flag if flag in OPTION_BY_FLAG else ""))
        option = OPTION_BY_FLAG.get(ours or "")
        is_flag = option is not None and option.is_flag
        has_value_next = not equals and not is_flag and at + 1 < end and not words[at + 1].startswith("-")
        value = words[at + 1] if has_value_next else value
        if ours == "--include" and value.startswith("localhost:"):  # deepspeed --include localhost:0,1
            ours, value = "--devices", value.partition(":")[2]
        if ours:
            meant.append((ours, value))
            counts_all_nodes = flag in ALIAS_OF and ALIAS_OF[flag].of_all_nodes
            total = int(value) if counts_all_nodes and value.isdecimal() else total
        elif ours == "" and not _is_python(word):
            lost.append(f"{word} {value}" if has_value_next else word)
        # `python` before the script is no value of the option before
        at += 2 if has_value_next and not _is_python(value) else 1
    options = [word for option in _with_nproc_per_node(meant, total) for word in option if word]
    return [*options, *words[end:]], lost


def _is_python(word: str) -> bool:
    return PYTHON.fullmatch(os.path.basename(word)) is not None


def _with_nproc_per_node(meant: list[tuple[str, str]], total: int) -> list[tuple[str, str]]:
    """Return the options with the number of workers on each node, from the `total` of another launcher; 0: it named none.

    As with mpirun, each host gets as many workers as it has slots, one if it says none; then the hosts get one more each in turn.
    """
    typed = dict(meant)
    hosts = _hosts(typed) if total else ()
    if not hosts:
        nodes = typed.get("--nnodes", "")
        nnodes = int(nodes) if nodes.isdecimal() else 0
        is_equal_on_all = nnodes > 0 and total > 0 and total % nnodes == 0
        return _with_nproc(meant, total // nnodes) if is_equal_on_all else meant
    counts, remaining = [], total
    for host in hosts:
        counts.append(min(host.slots or 1, remaining))
        remaining -= counts[-1]
    each, more = divmod(remaining, len(hosts))
    counts = [count + each + (1 if index < more else 0) for index, count in enumerate(counts)]
    if counts == [host.slots for host in hosts]:  # which the hosts say themselves
        return [option for option in meant if option[0] != _NPROC_FLAG]
    if len(set(counts)) == 1 and all(host.slots is None for host in hosts):
        return _with_nproc(meant, counts[0])
    # an IPv6 address, perhaps behind a user, gets brackets
    names = [re.sub(r"[^@]*:.*", r"[\g<0>]", host.name) for host in hosts]
    listed = ",".join(f"{name}:{count}" for name, count in zip(names, counts, strict=True) if count)
    others = [option for option in meant if option[0] not in (_NPROC_FLAG, "--hosts", "--hostfile")]
    return [*others, ("--hosts", listed)]


def _with_nproc(meant: list[tuple[str, str]], number: int) -> list[tuple[str, str]]:
    return [(flag, str(number) if flag == _NPROC_FLAG else value) for flag, value in meant]


def _hosts(typed: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the hosts of --hosts or --hostfile, among which the workers of another launcher's line are divided; () if unread."""
    from ddplaunch.plan.cluster import hostlist  # only for a mistake

    try:
        if "--hosts" in typed:
            return hostlist.parse_hosts(typed["--hosts"], origin="")
        if "--hostfile" in typed:
            with open(typed["--hostfile"], encoding="utf-8", errors="replace") as file:
                return hostlist.parse_hostfile(file.read(1 << 20), path="")
    except (OSError, LaunchError):  # which is no matter here: the line is wrong already
        pass
    return ()


def first_script(words: Sequence[str]) -> int | None:
    """Return where the script is, or -m before a module."""
    return next((at for at, word in enumerate(words) if word in ("-m", "--module") or word.endswith(".py")), None)


def flag_of(word: str) -> str:
    """Return the flag in a word, as the table has it: `--nproc_per_node=4` gives `--nproc-per-node`."""
    return word.partition("=")[0].replace("_", "-")
