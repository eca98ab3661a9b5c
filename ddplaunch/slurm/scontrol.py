"""Asks Slurm's controller, by `scontrol`, which may be missing in a container. Interprets nothing of a job."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence

PATIENCE = 60.0  # seconds for an answer that nobody waits for; scontrol asks a busy controller again by itself

_FIELD = re.compile(r"(?:^| )([A-Z][\w/:&]*)=(.*?)(?= [A-Z][\w/:&]*=|\s*$)")


class Unknown(Exception):
    """The controller does not answer, or cannot be asked; the text says why, as in a sentence."""


class Missing(Unknown):
    """There is no scontrol here."""


class UnknownJob(Unknown):
    """The controller knows no such job: there never was one, or it ended some minutes ago (MinJobAge)."""


def scontrol(env: Mapping[str, str], words: Sequence[str], patience: float) -> str:
    """Run scontrol and give what it says; `patience` in seconds.

    Raises:
        Unknown: it says nothing.
    """
    import subprocess  # takes 10 ms, and few jobs need it

    try:
        done = subprocess.run(
            ["scontrol", *words],
            env={**env, "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=patience,
            check=False,
            start_new_session=True,  # Ctrl-C is not for it
            preexec_fn=_bear_the_end,  # which is safe, since this process has no threads
        )
    except FileNotFoundError:
        raise Missing("there is no scontrol here") from None
    except OSError as error:
        raise Missing(f"scontrol cannot be run ({error.strerror})") from None
    except subprocess.TimeoutExpired:
        raise Unknown(f"scontrol has not answered within {patience:g} s") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise Unknown(f"scontrol says: {said[-1]}" if said else f"scontrol ended with status {done.returncode}")
    return done.stdout.decode(errors="surrogateescape")


def _bear_the_end() -> None:
    """Ignore SIGTERM in the child, since Slurm may send it to all processes of the job just now."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def jobs(env: Mapping[str, str], job_id: str, cluster: str | None = None) -> tuple[Mapping[str, str], ...]:
    """Give what `scontrol show job` says, a record for each element of an array.

    Raises:
        UnknownJob: there is none.
        Unknown: nobody knows, for now.
    """
    where = () if cluster is None else (f"--clusters={cluster}",)
    try:
        return parse(scontrol(env, (*where, "show", "job", "-o", job_id), PATIENCE))
    except Unknown as error:
        if "Invalid job id" in str(error):
            raise UnknownJob(str(error)) from None
        raise


def parse(text: str, first: str = "JobId") -> tuple[Mapping[str, str], ...]:
    """Read the lines of `scontrol --oneliner show`: NAME=VALUE NAME=VALUE, where a value may have spaces in it.

    `first` is the name with which all that is asked for begins.
    """
    return tuple(dict(_FIELD.findall(line)) for line in text.splitlines() if line.startswith(f"{first}="))
