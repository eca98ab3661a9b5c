"""A step of agents (one on each node of a Slurm job): srun's options, its start for the watcher that looks after it, its stdin.

srun gets a parent of its own, which has left the tree of processes that Slurm has started: where Slurm signals all that descends
from a batch script (`proctrack/linuxproc`), srun would kill the workers at the first SIGTERM, in the time that they have to save.
The watcher and that parent are connected by a socket: signals for srun go one way, the report of its end the other.

srun would read all of the command's stdin ahead, although no worker asks for it: a loop of the shell over the lines of a file
would end after one round. So srun's parent offers the descriptor at a socket, and the agent of the step on this host takes it:
a worker takes what it reads, and nobody takes the rest.
"""

from __future__ import annotations

import errno
import os
import re
import select
import signal
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import NoReturn

from msgspec import Struct

from ddplaunch.plan.cluster import hostlist
from ddplaunch.reach.slurm.job import ANSWER_TIMEOUT, job_id
from ddplaunch.reach.slurm.scontrol import JobRecord, ScontrolError, show_jobs
from ddplaunch.record.run_socket import uid_of
from ddplaunch.spec.options import token as secret
from ddplaunch.spec.options.token import STDIN
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.exitcodes import BUG, NOT_EXECUTABLE, NOT_FOUND
from ddplaunch.system.process.child import Child, StartError, Stdio, start, why_not_started
from ddplaunch.system.process.fork import fork

_CANNOT_FORK = "cannot create a process"


class StepJob(Struct, frozen=True, kw_only=True):
    """All that the watcher needs to know."""

    argv: tuple[str, ...]  # srun and the command of each task
    env: Mapping[str, str]  # of the step, with the job's token
    signals: frozenset[int]  # that the front passes on
    open_files: tuple[int, int]  # RLIMIT_NOFILE (soft, hard) of srun
    # what the watcher reads of srun: its stderr (2), which says which tasks have ended; its stdout (1) too, where rows about the
    # job stand below the output
    read_by_watcher: tuple[int, ...] = ()
    reads_stdin: bool = False  # rank 0, which is on this host, has the stdin of this command


class Srun:
    """srun, as the watcher sees it through the connection to its parent; `fd` is readable when srun has ended."""

    def __init__(self, connection: socket.socket, parent: int | None, output: Mapping[int, int]) -> None:
        """`connection` leads to its parent, and `parent` is a pidfd of that, None if there is none.

        `output`: where its stdout (1) and its stderr (2) are read; what is missing srun writes to ours.
        """
        self._connection = connection
        self._parent_pidfd = parent
        self.fd = connection.fileno()
        self.output = output

    def signal(self, signum: int) -> None:
        """Send srun a signal, if it still runs."""
        try:
            self._connection.send(bytes([signum]))
        except OSError:
            pass

    def kill_parent(self) -> None:
        """Kill its parent, which passes no signal on while somebody has it stopped; the kernel kills srun with it."""
        if self._parent_pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._parent_pidfd, signal.SIGKILL)

    def end(self) -> tuple[int, StartError | None]:
        """Return the wait status of srun, and the reason why it was never started; None if it was."""
        try:
            report = self._connection.recv(_LONGEST_REPORT)
        except ConnectionResetError:  # the parent has ended before it read our last signal: its report comes next
            report = self._connection.recv(_LONGEST_REPORT)
        self._connection.close()
        if self._parent_pidfd is not None:
            os.close(self._parent_pidfd)
        if not report:  # the parent was killed, and srun with it
            return signal.SIGKILL, None
        return _parse_report(report)


def not_started(why: StartError) -> LaunchError:
    """Return the error that no step could be started."""
    hint, status = "see what `srun --version` says here", NOT_EXECUTABLE
    if why.errno == errno.ENOENT:
        hint = "in a container without srun let srun start the containers: `srun --ntasks-per-node 1 ... ddplaunch ...`"
        status = NOT_FOUND
    elif why.errno in (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        hint = "the machine is at a limit: see `ulimit -u` and `ulimit -n`"
    elif why.errno == errno.E2BIG:
        hint = "the arguments and the variables are too long together: give the program a file in their place"
    return LaunchError(f"no step could be started: {why}", hint=hint, status=status)


def start_step(job: StepJob) -> Srun:
    """Start srun, which starts the agents; srun is killed when no process holds the returned connection any more.

    Call this before this process becomes a subreaper, since srun's parent has to become a child of process 1.
    """
    read_output: dict[int, int] = {}
    its_output = {1: 1, 2: 2}  # the descriptors of stdout and stderr for srun
    try:
        for stream in job.read_by_watcher:
            read_output[stream], its_output[stream] = os.pipe()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        told, tells = socket.socketpair()  # the child hands over a pidfd of the grandchild by it
        stdin_offer = offer_stdin() if job.reads_stdin else None
        pid = fork()
    except OSError as error:
        raise not_started(StartError(error.errno or errno.EAGAIN, _CANNOT_FORK)) from None
    if pid == 0:  # the child ends at once: process 1 adopts the grandchild, which has left the tree of Slurm so
        try:
            if (grandchild := fork()) == 0:
                for sock in (ours, told, tells):
                    sock.close()
                for fd in read_output.values():
                    os.close(fd)  # srun is to get an error if nobody reads
                _Parent(job, theirs, (its_output[1], its_output[2]), stdin_offer).run()
            with suppress(OSError):  # without it, the end of a step waits for a parent that is stopped
                socket.send_fds(tells, [b"."], [os.pidfd_open(grandchild)])
        except OSError as error:
            theirs.send(_report(0, StartError(error.errno or errno.EAGAIN, _CANNOT_FORK)))
        finally:
            os._exit(0)
    for sock in (theirs, tells, *([stdin_offer] if stdin_offer is not None else [])):
        sock.close()
    for stream in read_output:
        os.close(its_output[stream])
    os.waitpid(pid, 0)
    with told:
        _, received, _, _ = socket.recv_fds(told, 1, 1, socket.MSG_CMSG_CLOEXEC)
    return Srun(ours, received[0] if received else None, read_output)


_LONGEST_REPORT = 1000  # bytes


def _report(status: int, start_error: StartError | None) -> bytes:
    """Return the report of the end of srun: its wait status, then the number of the error and what failed, or 0."""
    return f"{status} {start_error.errno} {start_error.doing}".encode() if start_error else b"%d 0" % status


def _parse_report(report: bytes) -> tuple[int, StartError | None]:
    status, number, *doing = report.decode(errors="replace").split(" ", 2)
    return int(status), StartError(int(number), doing[0]) if int(number) else None


class _Parent(Struct, frozen=True):
    """The parent of srun, in a process of its own: starts srun, passes signals on to srun, and reports how srun ended."""

    job: StepJob
    connection: socket.socket  # to the watcher; once it ends, srun is killed
    its_output: tuple[int, int]  # the descriptors of stdout and stderr for srun
    stdin_offer: socket.socket | None  # where an agent asks for our stdin; None: no worker reads that

    def run(self) -> NoReturn:
        """Run srun to its end, and end this process."""
        try:
            os.setsid()
            for signum in self.job.signals:  # those for ddplaunch are not for this process
                signal.signal(signum, signal.SIG_IGN)
            self.connection.send(_report(*self._run_srun()))
        except BaseException:  # noqa: BLE001 - the watcher learns of it by the end of the connection
            os._exit(BUG)
        finally:
            os._exit(0)

    def _run_srun(self) -> tuple[int, StartError | None]:
        """Run srun to its end; return its wait status, and why srun was never started, None if it was.

        srun reads from /dev/null: it would take all of our stdin, whether a worker asks for that or not.
        """
        job = self.job
        # an agent of the step that serves rank 0 asks for our stdin at this socket, by its name
        env = job.env if self.stdin_offer is None else {**job.env, STDIN: name_of(self.stdin_offer)}
        try:
            nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            stdio = Stdio(nothing, *self.its_output)
            child = start(job.argv, env, stdio, handled=tuple(job.signals), open_files=job.open_files)
        except StartError as error:
            return 0, error
        except OSError as error:
            return 0, StartError(error.errno or errno.EMFILE, "cannot open its stdin")
        os.close(nothing)
        status = self._wait(child)
        return status, why_not_started(child, "srun")

    def _wait(self, child: Child) -> int:
        """Pass the signals of the connection on to srun until srun ends; kill srun if the connection ends first.

        Meanwhile hand our stdin to the agent that asks for it.
        """
        connection, stdin_offer = self.connection, self.stdin_offer
        poll = select.poll()
        for fd in (child.pidfd, connection.fileno(), *([stdin_offer.fileno()] if stdin_offer is not None else [])):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if child.pidfd in ready:
                break
            if stdin_offer is not None and stdin_offer.fileno() in ready:
                hand_over_stdin(stdin_offer)
            if connection.fileno() in ready:
                signum = connection.recv(1)
                if not signum:
                    poll.unregister(connection)  # it stays readable, and srun may not end at once
                signal.pidfd_send_signal(child.pidfd, signum[0] if signum else signal.SIGKILL)
        return os.waitpid(child.pid, 0)[1]


_HANDED_OVER_WITHIN = 5.0  # seconds that the agent waits: srun's parent hands it over at once, unless it was stopped


def offer_stdin() -> socket.socket:
    """Return a socket, without a name in any folder, at which `hand_over_stdin` is to be called once it is readable."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    listener.bind(f"\0ddplaunch-stdin-{os.urandom(16).hex()}")
    listener.listen(1)
    return listener


def name_of(listener: socket.socket) -> str:
    """Return the name by which `take_stdin` finds this socket, for a variable."""
    name: bytes = listener.getsockname()
    return name[1:].decode()


def hand_over_stdin(listener: socket.socket) -> None:
    """Send our stdin to whoever has connected, if that is a process of this user."""
    with suppress(OSError):  # the other side has ended already
        connection, _ = listener.accept()
        with connection:
            if uid_of(connection) == os.getuid():
                socket.send_fds(connection, [b"."], [0])


def take_stdin(name: str) -> None:
    """Make the descriptor that is offered under this name our stdin; where there is none, stdin stays as it is."""
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_HANDED_OVER_WITHIN)
        connection.connect(f"\0{name}")
        if uid_of(connection) != os.getuid():
            return
        _, received, _, _ = socket.recv_fds(connection, 1, 1)  # a byte, and at most one descriptor
        for fd in received:
            os.dup2(fd, 0)
            os.close(fd)


# Of the variables that srun reads, or that describe a job, those that a step of agents gets: what names the job, its nodes and
# what it was granted. All others of Slurm's are options, of the script, of a task in which it was submitted or of the user:
# SLURM_NTASKS, SLURM_STDOUTMODE, SLURM_DEBUG, SRUN_EXPORT_ENV. The tasks are given theirs by Slurm.
_FOR_THE_STEP = re.compile(
    r"SLURM_(JOB_.*|JOBID|ARRAY_.*|HET_.*|PACK_.*|NODELIST|NNODES|CONF|CONF_SERVER|CLUSTER_NAME|WORKING_CLUSTER|SUBMIT_.*"
    r"|RESTART_COUNT|MEM_PER_.*|GPUS_PER_NODE|GRES|HINT|NETWORK|THREADS_PER_CORE|CPU_FREQ_REQ|SPANK_.*|TASK_PROLOG|TASK_EPILOG)"
)


_OF_SLURM = re.compile(r"(SLURM|SRUN|SLURMD)_")


# the suffix of a variable of one component of a heterogeneous job; PACK until Slurm 20.02
_OF_COMPONENT = re.compile(r"_(HET|PACK)_GROUP_\d+$")


Grants = Mapping[str, Counter[str]]  # by node: how many GPUs of each type, "" for those without one


_GPUS = re.compile(r"\bgpu:(?:([^:(,]+):)?(\d+)(?=[(,]|$)")


# of a job with GPUs; the last one is set for a batch script alone
_GPU_SIGNS = ("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET", "SLURM_NTASKS_PER_GPU", "SLURM_JOB_GPUS")


def task_options(nodes: Sequence[str], gpus: Grants = MappingProxyType({}), mpi: str = "none") -> list[str]:
    """Return the options of srun for one task on each of these nodes, with all its CPUs and GPUs; `mpi` as in `mpi_type`."""
    number = len(nodes)
    return [
        *("--quiet", f"--nodes={number}", f"--ntasks={number}", "--ntasks-per-node=1"),
        *(*gpu_options(nodes, gpus), f"--nodelist={hostlist.compress(nodes)}", "--cpu-bind=none", "--gpu-bind=none"),
        *("--mem-bind=none", "--kill-on-bad-exit=0", "--wait=0", f"--mpi={mpi}", "--export=ALL"),
    ]


def component_options(number: int | None) -> list[str]:
    """Return the options of srun for nodes of this component of a heterogeneous job; None: the job is none."""
    return [] if number is None else [f"--het-group={number}"]


def public_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of any step: none that srun takes for its options, and no secret."""
    return {
        name: value
        for name, value in secret.visible_to_workers(env).items()
        if not _OF_SLURM.match(name) or _FOR_THE_STEP.fullmatch(_OF_COMPONENT.sub("", name))
    }


def are_grants_uncertain(env: Mapping[str, str]) -> bool:
    """Whether a step of this job may not be given all its GPUs unless it asks for them."""
    names = {_OF_COMPONENT.sub("", name) for name in env}
    return "SLURM_GPUS_PER_NODE" not in names and not names.isdisjoint(_GPU_SIGNS)


def query_grants(env: Mapping[str, str]) -> Grants:
    """Query slurmctld about the GPUs of this job; what cannot be learned is left to what srun gives by itself."""
    with suppress(ScontrolError, LaunchError):
        return grants_of(show_jobs(env, job_id(env), ANSWER_TIMEOUT, details=True))
    return {}


def grants_of(jobs: Sequence[JobRecord]) -> Grants:
    """Return the GPUs of each node, from the records of a job with their details; LaunchError if a list of nodes is malformed."""
    found: dict[str, Counter[str]] = {}
    for nodes, gres in (grant for job in jobs for grant in job.grants):
        for node in hostlist.expand(nodes, "Nodes"):
            each = found.setdefault(node, Counter())
            for kind, number in _GPUS.findall(gres):
                each[kind] += int(number)
    return found


def gpu_options(hosts: Sequence[str], grants: Grants) -> tuple[str, ...]:
    """Return the options of srun for the GPUs of these nodes, and whether the step may overlap with others.

    A number for all nodes is met by what each of them has, but not in a step that overlaps: it counts no GPU as its own.
    """
    each = [grants.get(host, Counter[str]()) for host in hosts]
    if not any(each):
        return ("--overlap",)
    are_equal = all(one == each[0] for one in each)
    counted = sorted((each[0] if are_equal else sum(each, Counter[str]())).items())
    gpus = ",".join(f"{kind}:{number}" if kind else f"{number}" for kind, number in counted)
    return ("--overlap", f"--gpus-per-node={gpus}") if are_equal else (f"--gpus={gpus}",)
