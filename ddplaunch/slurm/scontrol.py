"""Runs `scontrol`, which may be missing in a container, and parses its output. Interprets nothing of a job."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from functools import partial

POLL_TIMEOUT = 60.0  # seconds for a reply that holds nothing up; scontrol itself retries a busy slurmctld

_MARGIN = 1.0  # seconds for its end, beyond the time that it has
# as Slurm 22.05 writes it; the second one of `scontrol requeue`
_NO_REPLY = re.compile(r"Unable to contact slurm controller|Unexpected message received|[Tt]imed out|Zero Bytes")
_FIELD = re.compile(r"(?:^| )([A-Z][\w/:&]*)=(.*?)(?= [A-Z][\w/:&]*=|\s*$)")


class ScontrolError(Exception):
    """slurmctld does not reply, or scontrol cannot be run; the text says why, as in a sentence."""


class ScontrolMissing(ScontrolError):
    """scontrol is not installed."""


class Unreachable(ScontrolError):
    """slurmctld does not reply: it is restarted, or very busy."""


class UnknownJob(ScontrolError):
    """slurmctld knows no such job: there never was one, or it ended some minutes ago (MinJobAge)."""


def scontrol(env: Mapping[str, str], arguments: Sequence[str], timeout: float) -> str:
    """Run scontrol and give its output; `timeout` in seconds.

    Raises:
        ScontrolError: it fails, or does not reply in time.
    """
    from ddplaunch.process.ask import AskedEnded, ask  # few jobs need it

    try:
        # it may lie, or wait, on a file server that does not answer: then even SIGKILL does not end it
        return ask(partial(_run, env, arguments, timeout), timeout + _MARGIN)
    except TimeoutError:
        raise ScontrolError(f"scontrol timed out after {timeout:g} s") from None
    except AskedEnded as error:
        raise ScontrolError(f"scontrol cannot be run ({error})") from None
    except OSError as error:
        raise ScontrolError(f"scontrol cannot be run ({error.strerror})") from None


def _run(env: Mapping[str, str], arguments: Sequence[str], timeout: float) -> str:
    import subprocess  # takes 10 ms, and few jobs need it

    try:
        done = subprocess.run(
            ["scontrol", *arguments],
            env={**env, "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
            start_new_session=True,  # Ctrl-C must not end it
            preexec_fn=_ignore_sigterm,  # which is safe, since this process has no threads
        )
    except FileNotFoundError:
        raise ScontrolMissing("scontrol is not on PATH") from None
    except OSError as error:
        raise ScontrolMissing(f"scontrol cannot be run ({error.strerror})") from None
    except subprocess.TimeoutExpired:
        raise Unreachable(f"scontrol timed out after {timeout:g} s") from None
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = f"scontrol: {lines[-1]}" if lines else f"scontrol ended with status {done.returncode}"
        raise Unreachable(reason) if _NO_REPLY.search(reason) else ScontrolError(reason)
    return done.stdout.decode(errors="surrogateescape")


def _ignore_sigterm() -> None:
    """Ignore SIGTERM in the child, since Slurm may send it to all processes of the job just now; take all others again."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def jobs(env: Mapping[str, str], job_id: str, cluster: str | None = None) -> tuple[Mapping[str, str], ...]:
    """Return the records of `scontrol show job`, one for each element of an array.

    Raises:
        UnknownJob: there is no such job.
        ScontrolError: there is no reply for now.
    """
    where = () if cluster is None else (f"--clusters={cluster}",)
    try:
        return parse_records(scontrol(env, (*where, "show", "job", "-o", job_id), POLL_TIMEOUT))
    except ScontrolError as error:
        if "Invalid job id" in str(error):
            raise UnknownJob(str(error)) from None
        raise


def parse_records(text: str, first: str = "JobId") -> tuple[Mapping[str, str], ...]:
    """Parse the lines of `scontrol --oneliner show`: NAME=VALUE NAME=VALUE, where a value may have spaces in it.

    `first` is the name with which each record begins.
    """
    return tuple(dict(_FIELD.findall(line)) for line in text.splitlines() if line.startswith(f"{first}="))
