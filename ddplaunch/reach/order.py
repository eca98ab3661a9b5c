"""The order for a host (the job, and the host's part in it), written where the job was typed and read on the host.

It has those of the caller's variables that mean something on another host. Pure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from msgspec import Struct

from ddplaunch.plan.cluster import Allocation, Endpoint, Rendezvous
from ddplaunch.plan.cluster.endpoints import LOOPBACK
from ddplaunch.plan.cluster.hostlist import Host
from ddplaunch.reach.protocol import HostOrder
from ddplaunch.spec.job import Fault, Given, JobSpec
from ddplaunch.spec.options.resolve import sent
from ddplaunch.spec.options.table import OPTIONS, Reach
from ddplaunch.spec.options.token import VARIABLE as TOKEN
from ddplaunch.spec.order import Order
from ddplaunch.system.console.streams import Screen
from ddplaunch.system.fields import host as host_name
from ddplaunch.system.fields import line


class Orders(Struct, frozen=True, kw_only=True):
    """The orders for all hosts of a job, written where it was typed."""

    spec: JobSpec
    allocation: Allocation
    env: Mapping[str, str]  # the variables that are sent
    cwd: str
    run_id: str
    token: str  # the secret of the job
    screen: Screen

    def for_host(self, node_rank: int) -> HostOrder:
        """Write the order for the host with this rank."""
        spec, allocation = self.spec, self.allocation
        is_on_one_machine = len(allocation.hosts_to_start_on) == 1 or bool(spec.simulate)
        return HostOrder(
            job=Order.of(self._options(node_rank), spec),
            token=self.token,
            env=tuple((os.fsencode(name), os.fsencode(value)) for name, value in self.env.items()),
            cwd=os.fsencode(self.cwd),
            node_rank=node_rank,
            typed_on=host_name(os.uname().nodename),  # this host
            hosts=tuple(host.address for host in allocation.hosts_to_start_on),
            cluster=allocation.cluster,
            min_nodes=allocation.nnodes[0],
            endpoint=Endpoint(
                # None: as the other nodes reach node 0
                address=spec.master_addr or (LOOPBACK if is_on_one_machine else None),
                address_reason=line(allocation.endpoint.address_reason),
                port=allocation.endpoint.port,
                port_reason=line(allocation.endpoint.port_reason),
            ),
            screen=self.screen,
            heartbeat_timeout=spec.heartbeat_timeout,
            simulated=spec.simulate,
            killed=tuple(fault.target for fault in spec.chaos if fault.kind == "kill"),  # failure summaries say so
        )

    def _options(self, node_rank: int) -> list[Given]:
        """Return the options of the whole job as they were given, and those of this host, which replace options of the job.

        The list of hosts may say how many workers a host has (slots), and which devices.
        """
        host = self.allocation.hosts_to_start_on[node_rank]
        of_host = [Given.typed("run_id", self.run_id)]
        if host.slots is not None:
            of_host.append(Given.typed("nproc_per_node", str(host.slots)))
        if host.devices is not None:
            of_host.append(Given.typed("devices", ",".join(host.devices)))
        replaced = {one.name for one in of_host}
        of_job = [one for one in sent(self.spec, Reach.JOB) if one.name not in replaced]
        return [*of_job, *of_host]


def variables(order: HostOrder) -> dict[str, str]:
    """Return the variables of an order."""
    return {os.fsdecode(name): os.fsdecode(value) for name, value in order.env}


def allocation(order: HostOrder) -> Allocation:
    """Return the allocation of a host from its order.

    Its agent connects to no port of the coordinator (0): the pipe from which the order came carries that connection too.
    """
    return Allocation(
        cluster=order.cluster,
        nnodes=(order.min_nodes, len(order.hosts)),
        node_rank=order.node_rank,
        hosts=order.hosts,
        endpoint=order.endpoint,
        rendezvous=Rendezvous(addresses=(order.typed_on,), ports=(0,), coordinator=False),
        hosts_to_start_on=tuple(Host(name=name) for name in order.hosts),
        has_front=True,  # that of the command which has started this agent, and coordinates the job
    )


def faults(order: HostOrder) -> tuple[Fault, ...]:
    """Return what a failure summary has to know of --chaos."""
    return tuple(Fault(kind="kill", target=rank, after=0.0) for rank in order.killed)


# --- variables


# variables of one host, one login or one window. TERM, COLORTERM and COLUMNS are sent: what workers print
# ends up where the command was typed
_OF_HOST = frozenset((
    "HOME", "USER", "LOGNAME", "SHELL", "MAIL", "HOSTNAME", "HOST", "HOSTTYPE", "PWD", "OLDPWD", "SHLVL", "_",
    "DISPLAY", "XAUTHORITY", "WAYLAND_DISPLAY", "WINDOWID", "XDG_RUNTIME_DIR", "XDG_SEAT", "XDG_VTNR", "STY",
    "GPG_AGENT_INFO", "GPG_TTY", "KRB5CCNAME", "INVOCATION_ID", "JOURNAL_STREAM",
))  # fmt: skip
_PREFIXES_OF_HOST = ("SSH_", "DBUS_", "XDG_SESSION_", "TMUX", "VSCODE_", "ITERM_")
_OPTIONS = frozenset(name for option in OPTIONS for name, _ in option.variables if name.startswith("DDPLAUNCH_"))
_DEVICES = (
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
)  # fmt: skip


def variables_to_send(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that workers on other hosts get. The order holds the options and the token elsewhere."""
    ours = {TOKEN, *_OPTIONS}
    return {
        name: value
        for name, value in env.items()
        if not _is_of_host(name, value) and name not in ours and not name.startswith("PET_")
    }


def variables_on_host(
    sent: Mapping[str, str], own: Mapping[str, str], is_folder: Callable[[str], bool]
) -> dict[str, str]:
    """Return the variables of workers on a host: the sent ones, and the host's own variables about this host.

    A TMPDIR that does not exist here, such as one made for a batch job elsewhere, is replaced by this host's own.
    """
    merged = {**{name: value for name, value in own.items() if _is_of_host(name, value)}, **sent}
    if "TMPDIR" in sent and not is_folder(sent["TMPDIR"]):
        del merged["TMPDIR"]
        if "TMPDIR" in own:
            merged["TMPDIR"] = own["TMPDIR"]
    return merged


def _is_of_host(name: str, value: str) -> bool:
    # indices may mean devices of any host, a UUID means one of one host
    has_uuid = name in _DEVICES and any(mark in value for mark in ("GPU-", "MIG-"))
    return name in _OF_HOST or name.startswith(_PREFIXES_OF_HOST) or has_uuid
