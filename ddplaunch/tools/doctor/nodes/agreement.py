"""Judges where nodes differ that should not: versions, script, folders, clocks, the name of node 0; and who is lost. Pure.

Nodes are given by rank; `names` are what they are called, in the order of ranks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median_low
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from ddplaunch.plan.cluster import hostlist
from ddplaunch.reach.diagnose import HostError
from ddplaunch.system.words import duration
from ddplaunch.tools.doctor import Finding, Report, Severity
from ddplaunch.tools.doctor.nodes import Concern
from ddplaunch.tools.doctor.nodes.messages import Facts, Met, Shared

_CLOCK_DIFFERS = 0.5  # seconds: lines of several logs are no longer in the order of what happened
_CLOCK_BREAKS = 300.0  # seconds: beyond these munge, and so Slurm, and Kerberos refuse what another node has signed


def judge_lost(names: Sequence[str], lost: Mapping[int, HostError], least: int) -> Iterator[Concern]:
    """Yield a finding for each reason why nodes did not start, or stopped answering; the job needs `least` nodes."""
    are_too_few = len(names) - len(lost) < least
    severity: Severity = "broken" if are_too_few else "note"
    nodes_by_reason: dict[HostError, list[int]] = {}
    for node, why in sorted(lost.items()):
        without_status = replace(why, status=0)  # the exit status is not shown, and would tell equal reasons apart
        nodes_by_reason.setdefault(without_status, []).append(node)
    for why, nodes in nodes_by_reason.items():
        message, _, evidence = why.message.partition("\n")
        hint = (why.hint or "").replace("{host}", names[nodes[0]])
        yield _concern("nodes", severity, f"{_named(names, nodes)}: {message}", nodes, evidence=evidence, hint=hint)


def failed(names: Sequence[str], check: str, nodes: Sequence[int], why: str) -> Concern:
    """Return that some nodes could not answer a request of the doctor's."""
    return _concern(check, "broken", f"{_named(names, nodes)}: the check could not be made there", nodes, evidence=why)


def judge_facts(names: Sequence[str], facts: Mapping[int, Facts]) -> Iterator[Concern]:
    """Yield what a job would not find on some nodes, and what is not the same on all."""
    yield from _judge_versions(names, facts)
    yield from _judge_script(names, facts)


def _judge_versions(names: Sequence[str], facts: Mapping[int, Facts]) -> Iterator[Concern]:
    """Yield where torch, its NCCL or Python is missing, or another one than on most nodes."""
    without_torch = [node for node, one in facts.items() if not one.torch]
    if without_torch:
        title = f"{_named(names, without_torch)}: the workers' python has no torch"
        hint = "install the same torch there, or name the interpreter that has it: `--python PROGRAM`"
        yield _concern("versions", "broken", title, without_torch, hint=hint)
    torch = {node: one.torch for node, one in facts.items() if one.torch}
    # 2.13.0+cu130: another release or another CUDA speaks another protocol, or has another NCCL; a patch is only noted
    builds = {re.sub(r"^(\d+\.\d+)[^+]*", r"\1", text) for text in torch.values()}
    hint = "the ranks of a job have to run the same torch: install it on all nodes, or name the interpreter: `--python PROGRAM`"
    yield from _differing(names, "versions", "broken" if len(builds) > 1 else "note", "torch", torch, hint)
    without_nccl = [node for node, one in facts.items() if one.torch and not one.nccl]
    have_others_nccl = len(without_nccl) < len(torch)
    if without_nccl and have_others_nccl:
        title = f"{_named(names, without_nccl)}: its torch has no NCCL, that of others has"
        yield _concern("versions", "broken", title, without_nccl, hint=hint)
    python = {node: re.sub(r"(\d+\.\d+).*", r"\1", one.python) for node, one in facts.items()}
    hint = "objects that one node pickles may be unreadable on another: install the same Python"
    yield from _differing(names, "versions", "note", "Python", python, hint)


def _judge_script(names: Sequence[str], facts: Mapping[int, Facts]) -> Iterator[Concern]:
    """Yield where the folder of the command or its script is missing, and where the script is another one."""
    for reason, nodes in by_value(
        {node: one.folder_problem for node, one in facts.items() if one.folder_problem}
    ).items():
        hint = "ddplaunch runs on each host in the folder where it was typed: change to one that all nodes have"
        yield _concern("files", "broken", f"{_named(names, nodes)}: {reason}", nodes, hint=hint)
    for reason, nodes in by_value(
        {node: one.script_problem for node, one in facts.items() if one.script_problem}
    ).items():
        title = f"{_named(names, nodes)}: the script cannot be read: {reason}"
        hint = "copy it there, or keep it on a file system that all nodes share"
        yield _concern("files", "broken", title, nodes, hint=hint)
    digests = {node: one.script_digest for node, one in facts.items() if one.script_digest}
    hint = "ranks that run different code may wait for each other forever: copy the script to all nodes again"
    yield from _differing(names, "files", "broken", "script", digests, hint)


def judge_folders(names: Sequence[str], shared: Mapping[int, Shared]) -> Iterator[Concern]:
    """Yield which nodes do not share node 0's folders: they do not see the file that node 0 has made in each."""
    for text, is_seen, hint in (
        (
            "the current folder",
            {node: one.current for node, one in shared.items()},
            "checkpoints that one rank writes here are not seen there: write to a file system that all nodes share",
        ),
        (
            "the folder of runs",
            {node: one.runs for node, one in shared.items()},
            "each node keeps the logs of its own ranks, unless `--log-dir` names a folder that all nodes share",
        ),
    ):
        was_made = is_seen.get(0)  # if node 0 could not write there, its own checks say so
        if not was_made:
            continue
        others = [node for node, seen in is_seen.items() if seen is False]  # None: the folder fails there, or is none
        if others:
            title = f"{_named(names, others)}: {text} is another one than on {names[0]}"
            yield _concern("files", "note", title, others, hint=hint)


class Clock(Struct, frozen=True):
    """A node's clock against that of the doctor."""

    ahead: float  # seconds
    uncertain: float  # seconds, either way


def clock_of(sent_at: float, showed: float, came_at: float) -> Clock:
    """Return what a clock says that `showed` a time between two moments of ours, in seconds since 1970."""
    return Clock(showed - (sent_at + came_at) / 2, max(0.0, came_at - sent_at) / 2)


def judge_clocks(names: Sequence[str], clocks: Mapping[int, Clock]) -> Iterator[Concern]:
    """Yield which clocks differ from what most nodes show."""
    if not clocks:
        return
    usual = median_low(one.ahead for one in clocks.values())
    for node, one in clocks.items():
        off = one.ahead - usual
        least_off = abs(off) - one.uncertain
        if least_off > _CLOCK_DIFFERS:
            yield _concern(
                "clocks",
                "broken" if least_off > _CLOCK_BREAKS else "note",
                f"{names[node]}: its clock is {duration(abs(off))} {'ahead of' if off > 0 else 'behind'} the others",
                [node],
                evidence=f"measured to {duration(one.uncertain)}",
                hint="`timedatectl set-ntp true`, or `chronyc makestep` there",
            )


def judge_names(
    names: Sequence[str], met: Mapping[int, Met], facts: Mapping[int, Facts], name: str, *, is_needed: bool
) -> Iterator[Concern]:
    """Yield on which nodes the name of node 0 does not lead to node 0; `is_needed`: a job's workers connect to this name."""
    severity: Severity = "broken" if is_needed else "note"
    hint = f"correct {name} there in /etc/hosts or DNS (`getent hosts {name}`)"
    if not is_needed:
        hint += ". ddplaunch itself takes an address of node 0 that all nodes reach"
    addresses_of_node_0 = set(facts[0].addresses) if 0 in facts else set()
    reasons: dict[int, str] = {}
    for node, one in met.items():
        if one.reached is not None:
            continue
        where = ", ".join(one.addresses)
        if not one.addresses:
            reasons[node] = f"cannot resolve {name}, the name of node 0: {one.error}"
        elif all(address.startswith("127.") or address == "::1" for address in one.addresses):
            reasons[node] = f"{name}, the name of node 0, leads to {where} there, which is the node itself"
        elif addresses_of_node_0.isdisjoint(one.addresses):
            reasons[node] = f"{name}, the name of node 0, leads to {where} there, which is none of its addresses"
        # else the name is right, and the network is at fault, which the pairs show
    for reason, nodes in by_value(reasons).items():
        yield _concern("names", severity, f"{_named(names, nodes)}: {reason}", nodes, hint=hint)


def merged(names: Sequence[str], reports: Mapping[int, Report]) -> Iterator[Concern]:
    """Yield what the checks of single nodes have found; what several have in common, once."""
    nodes_with: dict[Finding, list[int]] = {}
    evidence: dict[Finding, str] = {}  # of the first node
    for node, report in sorted(reports.items()):
        for finding in report.findings:
            same = replace(finding, evidence="", hosts=())  # figures differ between nodes that have the same fault
            nodes = nodes_with.setdefault(same, [])
            if node not in nodes:
                nodes.append(node)
            evidence.setdefault(same, finding.evidence)
    for one, nodes in nodes_with.items():
        title = f"{_named(names, nodes)}: {one.title}"
        yield _concern(one.check, one.severity, title, nodes, evidence=evidence[one], hint=one.hint)


def faulty_nodes(
    number: int, lost: Mapping[int, HostError], concerns: Iterable[Concern]
) -> dict[int, tuple[Literal["slow", "unreachable"], str]]:
    """Return which nodes of so many are slow or out of reach as machines, and why in a line.

    Empty if more than half of all are so or lost: the fault then lies with this host or the network.
    """
    found: dict[int, tuple[Literal["slow", "unreachable"], str]] = {
        node: ("unreachable", why.message.partition("\n")[0])
        for node, why in lost.items()
        if why.may_be_fault_of_machine
    }
    for one in concerns:
        finding = one.finding
        # a bad link between two nodes may be the fault of either
        if finding.check == "network" and finding.severity != "note" and not one.blames_link:
            kind: Literal["slow", "unreachable"] = "slow" if finding.severity == "slow" else "unreachable"
            for node in one.nodes:
                found.setdefault(node, (kind, finding.title))
    return found if 2 * len(found.keys() | lost.keys()) <= number else {}


def good_nodes(number: int, concerns: Sequence[Concern]) -> list[int]:
    """Return the nodes of so many that are not lost and of which nothing broken or slow is known; of a bad link the first."""
    bad = {node for one in concerns if one.finding.check == "nodes" for node in one.nodes}  # lost, be it only a note
    matter = [one for one in concerns if one.finding.severity != "note"]
    for one in matter:
        if not one.blames_link:
            bad.update(one.nodes)
    for one in matter:
        are_good_but_for_link = one.blames_link and bad.isdisjoint(one.nodes)
        if are_good_but_for_link:  # one of the two is left out
            bad.add(max(one.nodes))
    return [node for node in range(number) if node not in bad]


def _differing(
    names: Sequence[str], check: str, severity: Severity, what: str, values: Mapping[int, str], hint: str
) -> Iterator[Concern]:
    """Yield a finding if a value differs between nodes; it names the nodes that do not have what most nodes have."""
    counts = Counter(values.values())
    if len(counts) < 2:
        return
    common = counts.most_common(1)[0][0]
    others = {node: value for node, value in values.items() if value != common}
    evidence = "; ".join(f"{value} on {_named(names, nodes)}" for value, nodes in by_value(values).items())
    title = f"{_named(names, others)}: another {what} than on the other nodes"
    yield _concern(check, severity, title, list(others), evidence=evidence, hint=hint)


def by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the nodes that have each value, by value."""
    found: dict[str, list[int]] = {}
    for node, value in sorted(values.items()):
        found.setdefault(value, []).append(node)
    return found


def _named(names: Sequence[str], nodes: Iterable[int]) -> str:
    """Name nodes in short: "gpu[01-03]"."""
    return hostlist.compress([names[node] for node in sorted(nodes)])


def _concern(
    check: str, severity: Severity, title: str, nodes: Sequence[int], *, evidence: str = "", hint: str = ""
) -> Concern:
    finding = Finding(check=check, severity=severity, title=title, evidence=evidence, hint=hint)
    return Concern(finding=finding, nodes=tuple(sorted(nodes)))
