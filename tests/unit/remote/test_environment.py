"""Which variables go along to other hosts."""

from __future__ import annotations

import pytest

from ddplaunch.reach.order import variables_on_host, variables_to_send

HERE = {"HOME": "/home/here", "PATH": "/here/bin", "SSH_CONNECTION": "1 2 3 4", "TMPDIR": "/tmp/job-7", "LANG": "C"}
CONNECTED = {"HOME": "/home/there", "PATH": "/there/bin", "SSH_CONNECTION": "5 6 7 8", "USER": "ann", "EDITOR": "vi"}


def test_the_callers_variables_count_but_for_those_that_describe_a_place():
    assert variables_on_host(variables_to_send(HERE), CONNECTED, lambda _: True) == {
        "HOME": "/home/there",
        "PATH": "/here/bin",
        "SSH_CONNECTION": "5 6 7 8",
        "USER": "ann",
        "TMPDIR": "/tmp/job-7",
        "LANG": "C",
    }


@pytest.mark.parametrize(
    "name",
    [
        "HOSTNAME",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
        "DISPLAY",
        "WAYLAND_DISPLAY",
        "DBUS_SESSION_BUS_ADDRESS",
        "XDG_RUNTIME_DIR",
        "XDG_SESSION_ID",
        "TMUX",
        "TMUX_PANE",
        "USER",
        "LOGNAME",
        "SHELL",
        "MAIL",
        "SSH_AUTH_SOCK",
        "DDPLAUNCH_TOKEN",
        "DDPLAUNCH_NNODES",
        "PET_NPROC_PER_NODE",
    ],
)
def test_what_describes_a_place_or_is_said_in_words_stays(name):
    assert variables_to_send({name: "x"}) == {}


@pytest.mark.parametrize(
    "name", ["TERM", "COLUMNS", "XDG_STATE_HOME", "DDPLAUNCH_DEVICE", "CUDA_VISIBLE_DEVICES", "SSHX"]
)
def test_the_rest_goes_along(name):
    assert variables_to_send({name: "0,1"}) == {name: "0,1"}


def test_devices_that_are_named_by_uuid_are_those_of_one_host():
    here, there = {"CUDA_VISIBLE_DEVICES": "GPU-12"}, {"CUDA_VISIBLE_DEVICES": "MIG-34"}
    assert variables_to_send(here) == {}
    assert variables_on_host({}, there, lambda _: True) == there


def test_a_folder_for_temporary_files_that_is_not_there_is_the_hosts_own():
    assert "TMPDIR" not in variables_on_host(variables_to_send(HERE), CONNECTED, lambda _: False)
    assert variables_on_host(variables_to_send(HERE), {"TMPDIR": "/scratch"}, lambda _: False)["TMPDIR"] == "/scratch"
