"""Why an agent could not be started on a host, in words: from what ssh, the shell or python there has said. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddplaunch import __version__
from ddplaunch.errors import LaunchError
from ddplaunch.exitcodes import BUG, NODE_LOST, NOT_EXECUTABLE, NOT_FOUND, RENDEZVOUS, USAGE
from ddplaunch.record import record

_SSH_FAILED = 255  # ssh(1); any other status is that of the remote command
_SHOWN = 8  # lines


@record
class HostError:
    """Why a job cannot run on a host."""

    message: str  # as it reads after the host's name
    hint: str | None = None  # for all hosts that have this trouble; {host} stands for the name of the first
    status: int = RENDEZVOUS


_LOGIN = "`ssh {host}` has to work without a question"
# the first pattern that is found in what was printed; OpenSSH's texts are in its readconf.c, sshconnect*.c and packet.c
_SSH: Sequence[tuple[str, str, str]] = (
    (
        r"Could not resolve hostname|Name or service not known|name resolution",
        "no host of this name is known",
        "is it spelled right? " + _LOGIN,
    ),
    (
        r"IDENTIFICATION HAS CHANGED",
        "its host key is not the one that ssh knows",
        "if it was installed anew: `ssh-keygen -R {host}`, then `ssh {host}` once",
    ),
    (
        r"Host key verification failed|No \S+ host key is known",
        "ssh does not know its host key",
        "type `ssh {host}` once and look at the key, or `ssh-keyscan {host} >> ~/.ssh/known_hosts` if you trust the network",
    ),
    (
        r"Permission denied|Too many authentication failures|no more authentication methods|Authentication failed",
        "ssh is not let in without a password",
        "`ssh-copy-id {host}` puts your key there; a key with a passphrase has to be in ssh-agent: `ssh-add`",
    ),
    (r"Connection refused", "it refuses connections for ssh", "is sshd running there? " + _LOGIN),
    (r"timed out", "no answer", "is it up, and is this the right network? " + _LOGIN),
    (r"No route to host|Network is unreachable|Host is down", "it cannot be reached", "is it up? " + _LOGIN),
    (
        r"Connection (closed|reset)|kex_exchange_identification",
        "it closed the connection",
        "sshd may be busy: see MaxStartups in its sshd_config; " + _LOGIN,
    ),
)


def explain(starter: str, python: str, status: int | None, said: str) -> HostError:
    """Say why ddplaunch did not start on a host; `status` is that of the command that should have started it.

    None means that it said what ddplaunch does not say.
    """
    if starter == "ssh" and status == _SSH_FAILED:
        for pattern, message, hint in _SSH:
            if re.search(pattern, said):
                return HostError(message, hint)
    elsewhere = (
        f"`{python} -m pip install ddplaunch=={__version__}` there, or name its interpreter: --remote-python PATH"
    )
    if re.search(r"No module named '?ddplaunch", said):
        return HostError(f"{python} there has no ddplaunch", elsewhere)
    if found := re.search(r"^(?:ModuleNotFound|Import)Error: (.*)", said, re.MULTILINE):
        return HostError(f"ddplaunch cannot be imported there: {found[1]}", elsewhere)
    if re.search(r"[Uu]nknown option:? -P", said):
        return HostError(f"{python} there is older than Python 3.11", "name a newer one: --remote-python PATH")
    other = "name the interpreter that has ddplaunch there: --remote-python PATH"
    if status == NOT_EXECUTABLE and "No such file" not in said:
        return HostError(f"{python} cannot be executed there", other)
    if status in (NOT_FOUND, NOT_EXECUTABLE) or re.search(rf"{re.escape(python)}.*not found", said):
        return HostError(f"{python} does not exist there", other)
    command = "its agent" if starter == "simulate" else starter
    ended = "did not start ddplaunch" if status is None else f"ended with status {status}"
    lines = said.strip().splitlines()[-_SHOWN:]
    return HostError(
        f"{command} {ended}" + "".join(f"\n  {line}" for line in lines), _LOGIN if starter == "ssh" else None
    )


def of_host(
    starter: str, python: str, *, never_started: str, has_answered: bool, status: int | None, said: str, fault: str
) -> HostError:
    """Say what is wrong with a host that is gone without the job's status.

    `never_started` is why there was no command to lead there, `status` how it ended, `fault` that for which we have ended it.
    """
    if never_started:
        return no_command(starter, never_started)
    if has_answered:
        return lost(starter, status, said, fault)
    return explain(starter, python, None if fault else status, fault or said)


def no_command(starter: str, reason: str) -> HostError:
    """Say why the command itself could not be started here."""
    hints = {"ssh": "install OpenSSH's client", "blaunch": "it comes with LSF: is this an LSF job?"}
    return HostError(f"{starter} cannot be run here: {reason}", hints.get(starter))


def other_version(version: str) -> HostError:
    """Say that another ddplaunch answers."""
    return HostError(
        f"ddplaunch there is {version}, here it is {__version__}",
        "install the same on all hosts, or name the interpreter that has it: --remote-python PATH",
    )


def no_answer(seconds: float) -> HostError:
    """Say that ddplaunch has not started there in time."""
    return HostError(f"it has not answered within {seconds:g} s", _LOGIN)


def refused(message: str, hint: str | None, status: int) -> HostError:
    """Say in its own words why the job cannot run there."""
    return HostError(message, hint, RENDEZVOUS if status == USAGE else status)


def lost(starter: str, status: int | None, said: str, fault: str = "") -> HostError:
    """Say that a host at which ddplaunch ran is gone; `fault` is that for which we have ended the way there."""
    lines = "".join(f"\n  {line}" for line in said.strip().splitlines()[-_SHOWN:])
    if status == BUG:
        return HostError(f"this is a bug in ddplaunch {__version__} there; please report it{lines}", None, BUG)
    command = "its agent" if starter == "simulate" else starter
    return HostError(f"lost: {fault or f'{command} ended with status {status}'}{lines}", None, NODE_LOST)


def cut_off() -> HostError:
    """Say that a host was waited for in vain."""
    return HostError("it has not said how the job ended", None, NODE_LOST)


def error(troubles: Sequence[tuple[str, HostError]]) -> LaunchError:
    """Put what happened on some hosts into one error."""
    first = troubles[0][1]
    by_message: dict[str, list[str]] = {}
    for host, trouble in troubles:
        by_message.setdefault(trouble.message, []).append(host.rpartition("@")[2])
    message = "\n  ".join(f"{_names(hosts)}: {what}" for what, hosts in by_message.items())
    return LaunchError(message, hint=first.hint and first.hint.replace("{host}", troubles[0][0]), status=first.status)


def _names(hosts: Sequence[str]) -> str:
    return ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")
