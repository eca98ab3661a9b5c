"""Which interface gloo and NCCL are told to use."""

import pytest

from ddplaunch.plan.variables import socket_interface_variables

BOTH = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}


def test_gloo_gets_the_name_and_nccl_an_exact_one():
    """Without `=`, NCCL would take eth01 too."""
    assert socket_interface_variables("eth0", {"PATH": "/bin"}) == BOTH


@pytest.mark.parametrize("value", ["ib0", "^docker,lo", ""], ids=["a name", "a pattern", "set to nothing"])
@pytest.mark.parametrize("name", BOTH)
def test_what_the_user_has_set_is_left_alone_and_says_nothing_of_the_other(name, value):
    given = socket_interface_variables("eth0", {name: value})
    assert given == {other: said for other, said in BOTH.items() if other != name}


def test_the_label_of_a_further_address_is_for_gloo_alone():
    """getifaddrs gives labels as names; NCCL takes what follows a colon for a port."""
    assert socket_interface_variables("eth0:1", {}) == {"GLOO_SOCKET_IFNAME": "eth0:1", "NCCL_SOCKET_IFNAME": "=eth0"}
