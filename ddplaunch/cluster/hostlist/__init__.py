"""Which hosts a text names: Slurm's host lists, --hosts, host files and filters. Pure: text in, values out; resolves no name.

Every parser takes the origin of its text ("--hosts", "SLURM_JOB_NODELIST", "hosts.txt:3"), for error messages.
"""

from __future__ import annotations

from ddplaunch.cluster.hostlist.brackets import compress, counts, expand
from ddplaunch.cluster.hostlist.filter import exclude, include
from ddplaunch.cluster.hostlist.host import Host
from ddplaunch.cluster.hostlist.hostfile import parse_hostfile, parse_hosts
