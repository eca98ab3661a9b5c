"""Asks Slurm's controller about jobs, by `scontrol`. It changes nothing, and does not wait for long."""

from __future__ import annotations

import re
from collections.abc import Mapping

PATIENCE = 60.0  # seconds for an answer; a busy controller takes its time, and scontrol asks again by itself

_FIELD = re.compile(r"(?:^| )([A-Z][\w/:&]*)=(.*?)(?= [A-Z][\w/:&]*=|\s*$)")


class NoAnswer(Exception):
    """The controller cannot be reached, or there is no scontrol; its text is what scontrol said."""


class UnknownJob(Exception):
    """The controller knows no such job: there never was one, or it ended some minutes ago (MinJobAge)."""


def jobs(job_id: str, cluster: str | None = None) -> tuple[Mapping[str, str], ...]:
    """Give what `scontrol show job` says, a record for each element of an array.

    Raises:
        UnknownJob: there is none.
        NoAnswer: nobody knows, for now.
    """
    import subprocess  # takes 10 ms, and few jobs need it

    where = [] if cluster is None else [f"--clusters={cluster}"]
    command = ["scontrol", *where, "--oneliner", "show", "job", job_id]
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, stdin=subprocess.DEVNULL, encoding="utf-8",
            errors="surrogateescape", timeout=PATIENCE,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoAnswer(str(error)) from None
    if done.returncode:
        said = done.stderr.strip()
        raise UnknownJob(said) if "Invalid job id" in said else NoAnswer(said)
    return parse(done.stdout)


def parse(text: str, first: str = "JobId") -> tuple[Mapping[str, str], ...]:
    """Read the lines of `scontrol --oneliner show`: NAME=VALUE NAME=VALUE, where a value may have spaces in it.

    `first` is the name with which all that is asked for begins.
    """
    return tuple(dict(_FIELD.findall(line)) for line in text.splitlines() if line.startswith(f"{first}="))
