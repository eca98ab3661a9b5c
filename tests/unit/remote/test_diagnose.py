"""Why an agent could not be started, from what ssh and others have printed."""

from __future__ import annotations

import pytest

from ddplaunch.reach import diagnose
from ddplaunch.reach.agents import argv
from ddplaunch.reach.diagnose import HostError

PYTHON = "/opt/py/bin/python"

# texts of OpenSSH 9.2, bash, dash, csh and CPython
SAID = [
    ("ssh: Could not resolve hostname gpu9: Name or service not known", 255, "cannot resolve the host name"),
    ("ssh: Could not resolve hostname gpu9: Temporary failure in name resolution", 255, "cannot resolve the host name"),
    ("ssh: connect to host gpu9 port 22: Connection refused", 255, "ssh connection refused"),
    ("ssh: connect to host gpu9 port 22: Connection timed out", 255, "ssh connection timed out"),
    ("Connection timed out during banner exchange", 255, "ssh connection timed out"),
    ("ssh: connect to host gpu9 port 22: No route to host", 255, "no route to host"),
    (
        "No ED25519 host key is known for gpu9 and you have requested strict checking.\nHost key verification failed.",
        255,
        "its host key is not in known_hosts",
    ),
    (
        "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\nHost key verification failed.",
        255,
        "its host key is not the one in known_hosts",
    ),
    ("ann@gpu9: Permission denied (publickey,password).", 255, "ssh cannot log in without a password"),
    ("Received disconnect from 10.0.0.9 port 22:2: Too many authentication failures", 255, "ssh cannot log in"),
    ("kex_exchange_identification: Connection closed by remote host", 255, "ssh connection closed"),
    (
        "kex_exchange_identification: read: Connection reset by peer\nConnection reset by 10.0.0.9 port 22",
        255,
        "ssh connection closed",
    ),
    ("ssh_exchange_identification: read: Connection reset by peer", 255, "ssh connection closed"),
    ("banner exchange: Connection to 10.0.0.9 port 22: Broken pipe", 255, "ssh connection closed"),
    (
        "kex_exchange_identification: Connection closed by remote host\nConnection closed by UNKNOWN port 65535",
        255,
        "ssh connection closed",
    ),
    (
        "channel 0: open failed: connect failed: Connection refused\nstdio forwarding failed\n"
        "kex_exchange_identification: Connection closed by remote host",
        255,
        "ssh connection refused",
    ),
    (
        "channel 0: open failed: administratively prohibited: open failed\nstdio forwarding failed\n"
        "kex_exchange_identification: Connection closed by remote host",
        255,
        "the jump host does not connect to it",
    ),
    ("bash: line 1: exec: /opt/py/bin/python: not found", 127, f"{PYTHON} does not exist there"),
    ("bash: line 1: /opt/py/bin/python: No such file or directory", 126, f"{PYTHON} does not exist there"),
    ("sh: 1: exec: /opt/py/bin/python: Permission denied", 126, f"{PYTHON} cannot be executed there"),
    ("/opt/py/bin/python: Command not found.", 1, f"{PYTHON} does not exist there"),
    ("/opt/py/bin/python: No module named ddplaunch", 1, f"{PYTHON} there has no ddplaunch"),
    ("/opt/py/bin/python: No module named ddplaunch.launcher.start.host", 1, f"{PYTHON} there has no ddplaunch"),
    (
        "Traceback ...\nModuleNotFoundError: No module named 'msgspec'",
        1,
        "cannot be imported there: No module named 'msg",
    ),
    ("Unknown option: -P\nusage: /opt/py/bin/python [option] ...", 2, f"{PYTHON} there is older than Python 3.11"),
    ("Bad configuration option: foo", 255, "ssh ended with status 255\n  Bad configuration option: foo"),
    ("", 255, "ssh ended with status 255"),
]


@pytest.mark.parametrize(
    ("said", "status", "message"), SAID, ids=[said.splitlines()[-1:][0] if said else "" for said, *_ in SAID]
)
def test_what_was_printed_says_what_is_wrong(said, status, message):
    found = diagnose.explain("ssh", PYTHON, status, f"\n{said}\n")
    assert message in found.message
    assert found.hint
    assert found.status == 121
    assert found.may_be_reached_later is (message == "ssh connection closed")


def test_words_of_ssh_mean_nothing_where_it_was_the_remote_command_that_failed():
    assert "let in" not in diagnose.explain("ssh", PYTHON, 1, "Permission denied").message


def test_hosts_with_one_trouble_are_named_together():
    found = [("ann@a", HostError("down", "ask {host}")), ("b", HostError("down")), ("c", HostError("odd"))]
    assert diagnose.combined(found).render() == "error: a, b: down\n  c: odd\n\nhint: ask ann@a\n"


def test_very_many_hosts_are_counted():
    text = diagnose.combined([(f"h{number}", HostError("down")) for number in range(20)]).message
    assert text == "h0, h1, h2, h3, h4, h5, h6, h7 and 12 more: down"
    text = diagnose.combined([(f"h{number}", HostError("down")) for number in range(20)], number_of_hosts=30).message
    assert text == "h0, h1, h2, h3, h4, h5, h6, h7 and 12 more (20 of 30 hosts): down"


def test_the_command_for_a_host_needs_no_terminal_asks_nothing_and_quotes():
    arguments = argv("ssh", "ann@gpu9", "/my py/bin/python", 10.0)
    assert arguments[-2:] == ("ann@gpu9", "exec '/my py/bin/python' -P -m ddplaunch.launcher.start.host")
    assert "-T" in arguments
    assert {"BatchMode=yes", "ServerAliveInterval=3", "ServerAliveCountMax=3", "ConnectTimeout=10"} <= set(arguments)
    assert argv("blaunch", "gpu9", PYTHON, 10.0) == (
        "blaunch",
        "gpu9",
        PYTHON,
        "-P",
        "-m",
        "ddplaunch.launcher.start.host",
    )
    assert argv("simulate", "node-1", PYTHON, 10.0) == (PYTHON, "-P", "-m", "ddplaunch.launcher.start.host")


LOST = [
    ("", 255, "", "ssh ended with status 255 without a word, as when ddplaunch is killed there"),
    (
        "Welcome to gpu9\nConnection to gpu9 closed by remote host.\r\n",
        255,
        "",
        "ssh ended with status 255: Connection to gpu9 closed by remote host",
    ),
    ("", 137, "", "ssh ended with status 137"),
    ("", 137, "silent for 10 s", "silent for 10 s"),
]


@pytest.mark.parametrize(("said", "status", "fault", "reason"), LOST)
def test_why_a_host_is_lost_is_said_in_one_line_with_the_last_words_of_ssh(said, status, fault, reason):
    found = diagnose.lost("ssh", status, f"\n{said}", fault)
    assert (found.reason, found.status) == (reason, 122)
