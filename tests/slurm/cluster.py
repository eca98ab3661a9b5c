"""A real Slurm on hosts of a bed: a controller, `ctl`, from which people submit, and three nodes with 8 CPUs and 4 GPUs each.

slurm.conf says how it is set. What the daemons keep, their key and the GPUs (device nodes that are /dev/null in truth) lie in
/run, which is each host's own; the machine's own Slurm, if it has one, is neither read nor touched. There is no database, so no
sacct, and cgroups only where they are asked for. All ends with the process that made the cluster, as the bed does.
"""

import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.conftest import PATIENCE, left_after, until
from tests.hosts.bed import SBIN, Bed
from tests.hosts.host import Command, Daemons, Files, Services
from tests.hosts.proc import Process

CONF = Path(__file__).parent / "slurm.conf"
CTL = "ctl"
NODES = ("node1", "node2", "node3")
GPUS = 4  # of each node
PORTS = (6817, 6818)  # slurmctld's, slurmd's
MUNGE_KEY = "/run/munge/key"

CGROUPS = Path("/sys/fs/cgroup")
CGROUP_CONF = f"CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nCgroupMountpoint={CGROUPS}\n"

_FIELD = re.compile(r"(?:^| )([A-Z][\w/:&]*)=(.*?)(?= [A-Z][\w/:&]*=|\s*$)")


def no_cgroups() -> str | None:
    """Why Slurm cannot track processes by cgroups here; None: it can."""
    freezer = CGROUPS / "freezer"
    if not os.access(freezer, os.W_OK):
        return f"Slurm without systemd needs cgroups of version 1, and {freezer} cannot be written to"
    return None


class Cluster:
    """The controller and its nodes.

    settings: what slurm.conf says otherwise here, by its names.
    cgroups: processes are tracked by the machine's cgroups, see `no_cgroups`; one such cluster at a time.
    """

    def __init__(self, *, settings: Mapping[str, str] | None = None, cgroups: bool = False) -> None:
        self._cgroups = cgroups
        by_cgroups = {"ProctrackType": "proctrack/cgroup", "TaskPlugin": "task/cgroup"} if cgroups else {}
        files: Files = {
            "/etc/slurm/slurm.conf": (_conf({**by_cgroups, **(settings or {})}), 0o644),
            "/etc/slurm/cgroup.conf": (CGROUP_CONF, 0o644),
            "/etc/slurm/gres.conf": (f"Name=gpu File=/run/gpu[0-{GPUS - 1}]\n", 0o644),
            MUNGE_KEY: (secrets.token_hex(64), 0o600),
        }
        munged = (
            [_path("munged"), "--key-file", MUNGE_KEY, "--log-file=/run/munge/log", "--seed-file=/run/munge/seed"],
            "/run/munge/munged.pid",
        )
        # nothing but its name is asked of a GPU; it is there as soon as mknod has ended
        gpus: Daemons = [(["mknod", f"/run/gpu{index}", "c", "1", "3"], f"/run/gpu{index}") for index in range(GPUS)]
        slurmd, slurmctld = ([_path("slurmd")], "/run/slurmd.pid"), ([_path("slurmctld")], "/run/slurmctld.pid")
        services = {
            node: Services(files=files, daemons=[*gpus, munged, slurmd], names=("munged", "slurmd")) for node in NODES
        }
        services[CTL] = Services(
            files=files, daemons=[munged, slurmctld], names=("munged", "slurmctld", "slurmscriptd")
        )
        self.nodes = NODES
        self.bed = Bed([*NODES, CTL], services=services, clocks=True)
        try:
            self.wait_nodes("idle")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove all of it."""
        self.bed.close()
        if self._cgroups:
            left = [*CGROUPS.glob("*/slurm_node*"), *CGROUPS.glob("*/slurm_node*/**/")]
            for folder in sorted(set(left), reverse=True):
                folder.rmdir()

    # --- what runs

    def start(
        self, argv: Sequence[object], host: str = CTL, *, env: Mapping[str, str] | None = None, **popen: Any
    ) -> Command:
        """Start a program on a host, as root, as Popen does."""
        environment = _without_slurm(os.environ) if env is None else env
        return self.bed.start(host, argv, env={**environment, "HOME": str(self.bed.home)}, **popen)

    def run(
        self,
        argv: Sequence[object],
        host: str = CTL,
        *,
        env: Mapping[str, str] | None = None,
        input: str | None = None,  # noqa: A002 - as subprocess.run has it
        check: bool = True,
        timeout: float = PATIENCE,
        **popen: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on a host to its end; that it fails is an error unless `check` is off."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.start(argv, host, env=env, **{**pipes, **popen}) as command:
            out, err = (_text(output) for output in command.communicate((input or "").encode(), timeout))
        done = subprocess.CompletedProcess(list(map(str, argv)), command.returncode, out, err)
        assert done.returncode == 0 or not check, done
        return done

    # --- nodes

    def node_states(self) -> dict[str, str]:
        """What sinfo says of each node."""
        lines = self.run(["sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T"]).stdout.splitlines()
        return dict(line.split() for line in lines)

    def wait_nodes(self, state: str, *nodes: str, patience: float = PATIENCE) -> None:
        """Wait until nodes, all of them if none is named, are in a state."""
        wanted = dict.fromkeys(nodes or NODES, state)
        until(lambda: self.node_states().items() >= wanted.items(), f"{', '.join(wanted)} to be {state}", patience)

    def kill_slurmd(self, node: str) -> None:
        """Kill the daemon of a node; jobs run on, and the controller gives the node up some 20 s later."""
        for process in self._slurmds(node):
            os.kill(process.pid, signal.SIGKILL)

    def start_slurmd(self, node: str) -> None:
        """Start the daemon of a node again."""
        self.run([_path("slurmd")], node)

    def stop_controller(self) -> None:
        """Stop slurmctld, which saves what it knows; jobs run on."""
        for process in self._controllers():
            if process.name == "slurmctld":
                os.kill(process.pid, signal.SIGTERM)
        until(lambda: not self._controllers(), "the controller to be gone")

    def start_controller(self) -> None:
        """Start slurmctld again, which knows all jobs from its files."""
        self.run([_path("slurmctld")], CTL)

    def drain(self, node: str) -> None:
        """Let no new job onto a node."""
        self._set(node, "state=drain", "reason=test")

    def down(self, node: str) -> None:
        """Declare a node broken: its jobs end at once. It is used again as soon as it says that it lives."""
        self._set(node, "state=down", "reason=test")

    def log(self, host: str) -> str:
        """What the daemon of a host has to say."""
        return self.bed.path(host, f"/run/{'slurmctld' if host == CTL else 'slurmd'}.log").read_text(errors="replace")

    def _set(self, node: str, *settings: str) -> None:
        self.run(["scontrol", "update", f"nodename={node}", *settings])

    def _slurmds(self, node: str) -> list[Process]:
        return [process for process in self.bed.daemons(node) if process.name == "slurmd"]

    def _controllers(self) -> list[Process]:
        return [process for process in self.bed.daemons(CTL) if process.name in ("slurmctld", "slurmscriptd")]

    def pass_time(self, seconds: float) -> None:
        """Let it be later on all hosts: Slurm looks at time limits, and sends --signal, every 30 s, and holds for two minutes
        what it has requeued."""
        self.bed.pass_time(seconds)

    # --- jobs

    def queue(self) -> list[str]:
        """The jobs that wait, run or are ending: `84 RUNNING`, one line for each."""
        return self.run(["squeue", "--noheader", "--format=%i %T"]).stdout.splitlines()

    def steps(self) -> list[str]:
        """The steps that run: 84.0, 84.batch."""
        return self.run(["squeue", "--noheader", "--steps", "--format=%i"]).stdout.split()

    def about(self, job: str) -> dict[str, str]:
        """What Slurm knows about a job, which may have ended; of one with several parts, about the first."""
        return dict(_FIELD.findall(self.run(["scontrol", "--oneliner", "show", "job", job]).stdout.splitlines()[0]))

    def left(self) -> dict[str, list[str]]:
        """All that jobs have left: in the queue, and what runs or listens on the hosts and is no daemon."""
        found = {"queue": self.queue()}
        for host in self.bed.alive:
            listeners = [listener for listener in self.bed.listeners(host) if listener.port not in PORTS]
            found[host] = [*map(str, self.bed.processes(host)), *map(str, listeners)]
        return {where: what for where, what in found.items() if what}

    def nothing_left(self, patience: float = PATIENCE) -> None:
        """Prove that jobs have left nothing, or soon will have: Slurm takes a moment to forget one that has ended."""
        left = left_after(patience, self.left)
        assert not left, left

    def heal(self) -> None:
        """End all jobs and all that they left, undo all faults, and wait until the nodes are idle."""
        self.bed.mend()
        if not self._controllers():
            self.start_controller()
        for node in NODES:
            if not self._slurmds(node):
                self.start_slurmd(node)
        if self.queue():
            self.run(["scancel", "--signal=KILL", "--full", "--user=root"], check=False)
            self.run(["scancel", "--user=root"], check=False)
            until(lambda: not self.queue(), "the queue to be empty")
        self.bed.heal()
        states = self.node_states()
        for node, state in states.items():
            if state.startswith(("drain", "down")):
                self.run(["scontrol", "update", f"nodename={node}", "state=resume"], check=False)
        if any(state != "idle" for state in states.values()):
            self.wait_nodes("idle")


def _conf(settings: Mapping[str, str]) -> str:
    kept = [line for line in CONF.read_text().splitlines() if line.partition("=")[0] not in settings]
    return "\n".join([*kept, *(f"{name}={value}" for name, value in settings.items())]) + "\n"


def _path(daemon: str) -> str:
    return str(shutil.which(daemon, path=f"{os.environ.get('PATH', os.defpath)}:{SBIN}"))


def _without_slurm(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(("SLURM_", "SBATCH_", "SALLOC_"))}


def _text(output: bytes | None) -> str:
    return (output or b"").decode(errors="replace")
