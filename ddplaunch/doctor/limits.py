"""Limits of this process that workers inherit: open files, locked memory, processes, core files."""

from __future__ import annotations

import resource

from msgspec import Struct

from ddplaunch.doctor import Check, Subject, Verdict


class Limits(Struct, frozen=True, kw_only=True):
    """The limits, soft and hard; -1: none."""

    nofile: tuple[int, int]


def read(_subject: Subject) -> Limits:
    """Read the limits of this process."""
    return Limits(nofile=resource.getrlimit(resource.RLIMIT_NOFILE))


def judge(limits: Limits) -> Verdict:
    """Judge the limits."""
    return Verdict(f"{limits.nofile[1]} open files")


CHECKS = (Check(id="limits", examine=lambda subject: judge(read(subject))),)
