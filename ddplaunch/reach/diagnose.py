"""Why an agent could not be started on a host, from what ssh, the shell or python there has printed.

For the dispatcher (the command that was typed), which starts the agents. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

from ddplaunch import __version__
from ddplaunch.reach.connections import HostConnection
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.exitcodes import BUG, NODE_LOST, NOT_EXECUTABLE, NOT_FOUND, RENDEZVOUS
from ddplaunch.system.fields import line
from ddplaunch.system.words import some

SSH_FAILED = 255  # ssh(1); any other status is that of the remote command
_SHOWN = 8  # lines
_MOST_NAMED = 8  # hosts with the same error


class HostError(Struct, frozen=True):
    """Why a job cannot run on a host."""

    message: str  # as it reads after the host's name
    hint: str | None = None  # for all hosts with this error; {host} stands for the name of the first
    status: int = RENDEZVOUS

    @property
    def may_be_fault_of_machine(self) -> bool:
        """Whether the machine or the network to it may be at fault, and not what is installed or allowed there."""
        return self.message.startswith(_UNREACHABLE)

    @property
    def may_be_reached_later(self) -> bool:
        """Whether the host may be reached a moment later: its sshd, or that of a jump host, has no room at the moment."""
        return self.message == _CLOSED

    @property
    def reason(self) -> str:
        """Why a host was lost, in one line: what ended, and the last line that it printed."""
        first, *printed = self.message.removeprefix("lost: ").splitlines()
        return line(f"{first}: {printed[-1].strip().removesuffix('.')}" if printed else first)


_CLOSED = "ssh connection closed"
UNRESOLVED = "cannot resolve the host name"
# the machine, or the network to it, may be at fault: how such messages begin
_UNREACHABLE = (
    "ssh connection refused",
    "ssh connection timed out",
    "no route to host",
    "ddplaunch did not start there within",
    "it has stopped answering",
    "lost: ",
)
_LOGIN_HINT = "`ssh {host}` has to work without a password prompt"
# the first pattern that is found in what was printed; OpenSSH's texts are in its readconf.c, sshconnect*.c and packet.c
_ERRORS_OF_SSH: Sequence[tuple[str, str, str]] = (
    (r"Could not resolve hostname|Name or service not known|name resolution", UNRESOLVED, "is it spelled right? " + _LOGIN_HINT),
    (r"IDENTIFICATION HAS CHANGED", "its host key is not the one in known_hosts",
        "if it was reinstalled: `ssh-keygen -R {host}`, then `ssh {host}` once"),
    (r"Host key verification failed|No \S+ host key is known", "its host key is not in known_hosts",
        "type `ssh {host}` once and check the key, or `ssh-keyscan {host} >> ~/.ssh/known_hosts` if you trust the network"),
    (r"Permission denied|Too many authentication failures|no more authentication methods|Authentication failed",
        "ssh cannot log in without a password",
        "`ssh-copy-id {host}` puts your key there; a key with a passphrase has to be in ssh-agent: `ssh-add`"),
    (r"Connection refused", "ssh connection refused", "is sshd running there? " + _LOGIN_HINT),
    (r"timed out", "ssh connection timed out", "is it up, and is this the right network? " + _LOGIN_HINT),
    (r"No route to host|Network is unreachable|Host is down", "no route to host", "is it up? " + _LOGIN_HINT),
    (r"stdio forwarding failed", "the jump host does not connect to it",
        "see AllowTcpForwarding in the sshd_config of the jump host; " + _LOGIN_HINT),
    (r"Connection (closed|reset)|(kex|ssh)_exchange_identification|banner exchange", _CLOSED,
        "sshd may be busy: see MaxStartups in its sshd_config; " + _LOGIN_HINT),
)  # fmt: skip


def explain(starter: str, python: str, status: int | None, output: str) -> HostError:
    """Find out why ddplaunch did not start on a host, by what `starter` ("ssh", "blaunch" or "simulate") has printed.

    `status` is that of the starter; None: ddplaunch here has killed it, and `output` is the reason. `python`: the interpreter
    on the host.
    """
    if starter == "ssh" and status == SSH_FAILED:
        for pattern, message, hint in _ERRORS_OF_SSH:
            if re.search(pattern, output):
                return HostError(message, hint)
    install = f"install ddplaunch {__version__} there, or name the interpreter that has it: --remote-python PATH"
    if re.search(r"No module named '?ddplaunch", output):
        return HostError(f"{python} there has no ddplaunch", install)
    if found := re.search(r"^(?:ModuleNotFound|Import)Error: (.*)", output, re.MULTILINE):
        return HostError(f"ddplaunch cannot be imported there: {found[1]}", install)
    if re.search(r"[Uu]nknown option:? -P", output):  # which is new in 3.11
        return HostError(f"{python} there is older than Python 3.11", "name a newer one: --remote-python PATH")
    name_another = "name the interpreter that has ddplaunch there: --remote-python PATH"
    # some shells end with 126 for a file that does not exist too
    if status == NOT_EXECUTABLE and "No such file" not in output:
        return HostError(f"{python} cannot be executed there", name_another)
    if status in (NOT_FOUND, NOT_EXECUTABLE) or re.search(rf"{re.escape(python)}.*not found", output):
        return HostError(f"{python} does not exist there", name_another)
    ended = "did not start ddplaunch" if status is None else f"ended with status {status}"
    return HostError(f"{_command(starter)} {ended}{_end_of(output)}", _LOGIN_HINT if starter == "ssh" else None)


def of_host(starter: str, python: str, host: HostConnection) -> HostError:
    """Find out what is wrong with a host whose connection closed without the job's status."""
    if host.start_error:
        hints = {"ssh": "install OpenSSH's client", "blaunch": "it comes with LSF: is this an LSF job?"}
        return HostError(f"{starter} cannot be run here: {host.start_error}", hints.get(starter))
    if host.was_connected:
        return lost(starter, host.exit_status, host.own_output, host.fault)
    return explain(starter, python, None if host.fault else host.exit_status, host.fault or host.own_output)


def other_version(version: str) -> HostError:
    """Make the error for a host with another version of ddplaunch."""
    return HostError(
        f"ddplaunch there is {version}, here it is {__version__}",
        "install the same on all hosts, or name the interpreter that has it: --remote-python PATH",
    )


def not_started(seconds: float) -> HostError:
    """Make the error for a host on which ddplaunch has not started in time."""
    return HostError(f"ddplaunch did not start there within {seconds:g} s", _LOGIN_HINT)


def lost(starter: str, status: int | None, output: str, fault: str) -> HostError:
    """Make the error for a connected host that was lost; `fault` is why we killed the connection."""
    lines = _end_of(output)
    if status == BUG:
        return HostError(f"this is a bug in ddplaunch {__version__} there; please report it{lines}", None, BUG)
    ended = f"{_command(starter)} ended with status {status}"
    if starter == "ssh" and status == SSH_FAILED and not lines:  # of a connection that breaks, ssh says so
        ended += " without a word, as when ddplaunch is killed there"
    return HostError(f"lost: {fault or ended}{lines}", None, NODE_LOST)


def _command(starter: str) -> str:
    return "its agent" if starter == "simulate" else starter


def _end_of(output: str) -> str:
    return "".join(f"\n  {line}" for line in output.strip().splitlines()[-_SHOWN:])


def combined(errors: Sequence[tuple[str, HostError]], number_of_hosts: int = 0) -> LaunchError:
    """Return the errors of several hosts, each with its name, as one; the hint and the status are those of the first.

    With `number_of_hosts`, that of all hosts, a list of more than _MOST_NAMED hosts says how many of these it has.
    """
    hosts_by_message: dict[str, list[str]] = {}
    for host, one in errors:
        hosts_by_message.setdefault(one.message, []).append(host.rpartition("@")[2])  # without the user
    lines = []
    for message, hosts in hosts_by_message.items():
        share = f" ({len(hosts)} of {number_of_hosts} hosts)" if number_of_hosts and len(hosts) > _MOST_NAMED else ""
        lines.append(f"{some(hosts, _MOST_NAMED)}{share}: {message}")
    first_host, first = errors[0]
    hint = first.hint and first.hint.replace("{host}", first_host)
    return LaunchError("\n  ".join(lines), hint=hint, status=first.status)
