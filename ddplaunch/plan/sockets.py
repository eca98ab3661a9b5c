"""The variables by which gloo and NCCL are told which interface leads to the other nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def socket_interface_variables(interface: str, env: Mapping[str, str]) -> dict[str, str]:
    """Give the variables that bind gloo and NCCL to one interface, as far as `env` does not set them itself.

    Left alone, gloo listens where the host's own name resolves to, which is 127.0.1.1 on many hosts
    (createDefaultDevice in torch/csrc/distributed/c10d/ProcessGroupGloo.cpp), and NCCL takes every interface that is not
    called docker, lo or virbr (ncclFindInterfaces in nccl's src/misc/socket.cc). The two are independent: who chooses a
    network for NCCL has said nothing of gloo's. One that is set but empty counts as set, and has each choose for itself.

    gloo takes names, separated by commas, letter for letter (Options::create_default in ProcessGroupGloo.cpp). NCCL
    takes them as beginnings of names, unless `=` stands before them, and nothing after a colon (ncclOsFindInterfaces in
    nccl's src/os/linux.cc, parseStringList in src/misc/utils.cc); so the label of a further address, eth0:1, is gloo's.
    """
    names = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface.partition(':')[0]}"}
    return {name: value for name, value in names.items() if name not in env}
