"""Which of the caller's variables are sent to other hosts, and which a host keeps of its own. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ddplaunch.options.table import OPTIONS
from ddplaunch.options.token import VARIABLE as TOKEN

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


def sent(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that workers on other hosts get; not the options among them, nor the token: both are in the order."""
    return {name: value for name, value in env.items() if not _is_of_host(name, value) and not _is_ours(name)}


def received(sent: Mapping[str, str], own: Mapping[str, str], is_folder: Callable[[str], bool]) -> dict[str, str]:
    """Return the variables of workers on a host: those that were sent, and the host's own ones about itself.

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


def _is_ours(name: str) -> bool:
    return name == TOKEN or name.startswith("PET_") or name in _OPTIONS
