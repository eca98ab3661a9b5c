"""The files that make separate namespaces a cluster: names, and ssh from each host to each, with keys of its own."""

import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.hosts.addresses import Addresses
from tests.hosts.host import Files

SSHD_CONFIG = """\
Port 22
HostKey /etc/ssh/host_key
PidFile /run/sshd.pid
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UseDNS no
MaxStartups 200
MaxSessions 200
PrintMotd no
Subsystem sftp internal-sftp
"""


def make_home(home: Path, addresses: Mapping[str, Iterable[str]]) -> str:
    """Fill root's home, which all hosts share, so that plain `ssh HOST` works; give the private key of the hosts."""
    ssh = home / ".ssh"
    home.mkdir(mode=0o700)
    ssh.mkdir(mode=0o700)
    host_key = home / "host_key"
    for key in (ssh / "id_ed25519", host_key):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "bed", "-f", str(key)], check=True)
    (ssh / "authorized_keys").write_text((ssh / "id_ed25519.pub").read_text())
    public = host_key.with_suffix(".pub").read_text()
    (ssh / "known_hosts").write_text("".join(f"{','.join((n, *a))} {public}" for n, a in addresses.items()))
    private = host_key.read_text()
    host_key.unlink()
    host_key.with_suffix(".pub").unlink()
    return private


def files(name: str, plan: Addresses, home: Path, host_key: str) -> Files:
    """What is written over the machine's own /etc on one host."""
    return {
        "/etc/hostname": (f"{name}\n", 0o644),
        "/etc/machine-id": (f"{plan.number(name) + 1:032x}\n", 0o444),
        "/etc/hosts": (plan.hosts_file(name), 0o644),
        "/etc/nsswitch.conf": ("passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n", 0o644),
        "/etc/resolv.conf": ("", 0o644),  # nobody to ask: an unknown name fails at once
        "/etc/passwd": (_passwd(home), 0o644),
        "/etc/shadow": ("root:*:1:0:99999:7:::\n", 0o600),  # a `!` in place of the `*` would shut root out from ssh
        "/etc/ssh/ssh_config": ("", 0o644),
        "/etc/ssh/sshd_config": (SSHD_CONFIG, 0o644),
        "/etc/ssh/host_key": (host_key, 0o600),
        "/run/sshd/.keep": ("", 0o644),
    }


def _passwd(home: Path) -> str:
    """The machine's users, root living in `home`."""
    users = [line.split(":") for line in Path("/etc/passwd").read_text("latin-1").splitlines()]
    for user in users:
        if user[0] == "root":
            user[5] = os.fspath(home)
    return "".join(":".join(user) + "\n" for user in users)
