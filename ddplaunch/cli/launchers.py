"""The command lines of other launchers, torchrun to horovodrun, as ddplaunch takes them. Looks at files only."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ddplaunch.spec.options.table import ALIAS_OF, ALIASES, BY_NAME, OPTIONS, Option
from ddplaunch.system.errors import LaunchError

if TYPE_CHECKING:
    from ddplaunch.plan.cluster.hostlist import Host

_NUMBER = "--nproc-per-node"
PYTHON = re.compile(r"python(\d(\.\d+)?)?")
FLAGS: Mapping[str, Option | None] = {
    **{option.flag: option for option in OPTIONS},
    **{option.short: option for option in OPTIONS if option.short},
    **{alias.flag: BY_NAME[alias.option] for alias in ALIASES},
    **dict.fromkeys(("--help", "--help-all", "--version")),
}
# options of other launchers, and ours of the same meaning, besides those of ALIASES; None: nothing has to be said here
_OURS = {alias.flag: BY_NAME[alias.option].flag for alias in ALIASES}
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


def of_launcher(name: str, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words after another launcher as ddplaunch takes them, and those of them that have no counterpart."""
    known, meant, lost = LAUNCHERS[name], list[tuple[str, str]](), list[str]()
    words = list(words[1:] if name == "accelerate" and words[:1] == ["launch"] else words)
    end = first_script(words)
    if end is None:
        return [], []
    at, total = 0, 0  # workers of all nodes
    while at < end:
        typed, equals, value = words[at].partition("=")
        flag = flag_of(words[at])
        ours = known.get(flag, _OURS.get(flag, flag if flag in FLAGS else ""))
        has_value = not equals and at + 1 < end and not words[at + 1].startswith("-")
        option = FLAGS.get(ours or "")
        has_value = has_value and not (option is not None and option.is_flag)
        value = words[at + 1] if has_value else value
        if ours == "--include" and value.startswith("localhost:"):
            ours, value = "--devices", value.partition(":")[2]
        if ours:
            meant.append((ours, value))
            total = int(value) if flag in ALIAS_OF and ALIAS_OF[flag].of_all_nodes and value.isdecimal() else total
        elif ours == "" and not PYTHON.fullmatch(os.path.basename(typed)):
            lost.append(words[at] + (f" {value}" if has_value else ""))
        at += 2 if has_value and PYTHON.fullmatch(os.path.basename(value)) is None else 1
    options = [word for option in _on_each_node(meant, total) for word in option if word]
    return [*options, *words[end:]], lost


def _on_each_node(meant: list[tuple[str, str]], total: int) -> list[tuple[str, str]]:
    """Return the options with the number of workers on each node, from the `total` of another launcher; 0: it named none.

    As with mpirun, each host gets as many workers as it has slots; then the hosts get one more each in turn.
    """
    typed = dict(meant)
    hosts, nodes = _hosts(typed) if total else (), typed.get("--nnodes", "")
    others = [option for option in meant if option[0] != _NUMBER]
    if not hosts:
        number = total // int(nodes) if nodes.isdecimal() and int(nodes) and total % int(nodes) == 0 else 0
        return _numbered(meant, number) if number else meant
    counts, left = [0] * len(hosts), total
    for at, host in enumerate(hosts):
        counts[at] = min(host.slots or 1, left)
        left -= counts[at]
    counts = [count + left // len(hosts) + (at < left % len(hosts)) for at, count in enumerate(counts)]
    if counts == [host.slots for host in hosts]:
        return others
    if len(set(counts)) == 1 and all(host.slots is None for host in hosts):
        return _numbered(meant, counts[0])
    names = [re.sub(r"[^@]*:.*", r"[\g<0>]", host.name) for host in hosts]  # an IPv6 address is in brackets
    listed = ",".join(f"{name}:{count}" for name, count in zip(names, counts, strict=True) if count)
    return [*(option for option in others if option[0] not in ("--hosts", "--hostfile")), ("--hosts", listed)]


def _numbered(meant: list[tuple[str, str]], number: int) -> list[tuple[str, str]]:
    return [(flag, str(number) if flag == _NUMBER else value) for flag, value in meant]


def _hosts(typed: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the hosts of --hosts, or in the file of --hostfile; () if these cannot be read."""
    from ddplaunch.plan.cluster import hostlist  # only for a mistake

    try:
        if "--hosts" in typed:
            return hostlist.parse_hosts(typed["--hosts"], "")
        if "--hostfile" in typed:
            with open(typed["--hostfile"], encoding="utf-8", errors="replace") as file:
                return hostlist.parse_hostfile(file.read(1 << 20), "")
    except (OSError, LaunchError):
        pass
    return ()


def first_script(words: Sequence[str]) -> int | None:
    """Return where the script is, or -m before a module."""
    return next((at for at, word in enumerate(words) if word in ("-m", "--module") or word.endswith(".py")), None)


def flag_of(word: str) -> str:
    """Return the flag in a word, as the table has it: `--nproc_per_node=4` gives `--nproc-per-node`."""
    return word.partition("=")[0].replace("_", "-")
