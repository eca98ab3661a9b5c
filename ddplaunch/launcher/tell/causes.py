"""Common causes of a worker's end, recognized by its text and by facts of the node, with one line of advice each.

A table, read from the top. Pure: `first_failure` picks the worker, the agent finds the facts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from signal import SIGABRT, SIGBUS, SIGHUP, SIGILL, SIGINT, SIGKILL, SIGQUIT, SIGSEGV, SIGTERM

from msgspec import Struct

from ddplaunch.launcher.decide.first_failure import failure_text, follows_another, searchable
from ddplaunch.spec.outcome import OUT_OF_WALLTIME, PREEMPTED, Traces, WorkerExit
from ddplaunch.system.net.addresses import WITHOUT_INTERFACE
from ddplaunch.system.words import count, signal_name, size

_WHILE_HANDLING = "\nDuring handling of the above exception, another exception occurred:\n"
_FRAME_LINES = r'^  File "[^"\n]{1,999}", line \d{1,9}.*\n(?:    .*\n)*'
_RENDEZVOUS = r'torch/distributed/rendezvous\.py"|\bDist(?:Network|Store)Error: |\[c10d\]|\bTCPStore\('
_PORT = r"\bport: (\d{1,5})\b|connect to \([^()\n]{1,99}, (\d{1,5})\)"
NO_TRACES = Traces(oom_kills=0, shm=None, log_folder=None)
_SMALL_SHM = 64 * 1024**2  # bytes; what Docker gives a container by default


class Evidence(Struct, frozen=True, kw_only=True):
    """What is known about the node of the first failure."""

    traces: Traces = NO_TRACES
    ended_by: str = ""  # why the cluster has ended the job: PREEMPTED, OUT_OF_WALLTIME or others
    interpreter: str | None = None  # that ran the workers
    workers: int = 1  # of the job
    program: str = "SCRIPT"  # that each runs, with its arguments, as it is typed
    master_port: int | None = None  # of the generation; None: not known
    port_given: bool = False  # the user has chosen it
    debugging: bool = False  # a worker has the terminal (--debug)
    chaos: bool = False  # --chaos was to kill this worker

    @property
    def shm_full(self) -> bool:
        """Whether /dev/shm is full."""
        return self.traces.shm is not None and self.traces.shm[1] < self.traces.shm[0] / 50

    @property
    def shm_small(self) -> bool:
        """Whether /dev/shm is so small that it may have been full: a dead worker's part of it is free again at once."""
        return self.traces.shm is not None and self.traces.shm[0] <= _SMALL_SHM


Found = Mapping[str, str]  # values for the advice, and "line": the text that fitted
Predicate = Callable[[WorkerExit, Evidence], Found | None]


class Row(Struct, frozen=True):
    """One line of the table of causes."""

    name: str
    predicate: Predicate
    advice: str
    fault: str = ""  # the kind of fault, as in record/bad_nodes.py; "": not the machine's


def matches(pattern: str) -> Predicate:
    """Return a predicate on what the failure says, with all that led to it; the groups that took part are values for the advice.

    The lines of code in a traceback do not count: they may name an error that they handle.
    """
    return lambda end, _: _search(pattern, failure_text(end), without=_FRAME_LINES)


def says_itself(pattern: str) -> Predicate:
    """Return a predicate on what a failure says itself, or names as its cause; an exception handled before does not count.

    A program that tries to import a module and goes on without is not ended by that. The code of a traceback does not count.
    """

    def fits(end: WorkerExit, _: Evidence) -> Found | None:
        error = end.error
        if error is not None and error.type != "SystemExit":  # before sys.exit() the reason was printed
            last = error.traceback.rpartition(_WHILE_HANDLING)[2]
            return _search(pattern, f"{error.type}: {error.message}\n{last}", without=_FRAME_LINES)
        return _search(pattern, failure_text(end).rpartition(_WHILE_HANDLING)[2], without=_FRAME_LINES)

    return fits


def code_matches(pattern: str) -> Predicate:
    """Return a predicate on the whole text of the failure, the files and lines of code in its traceback included."""
    return lambda end, _: _search(pattern, failure_text(end))


def of_rendezvous(end: WorkerExit, facts: Evidence) -> Found | None:
    """Fit a failure of torch's rendezvous at MASTER_ADDR and MASTER_PORT, not that of another connection of the program.

    torch's store raises exceptions of its own, or its frames are in the traceback; a port in the text has to be MASTER_PORT. gloo
    connects the ranks with each other, at other addresses.
    """
    text = searchable(failure_text(end))
    if not text or "gloo/transport" in text or not re.search(_RENDEZVOUS, text):
        return None
    ports = {int(one or other) for one, other in re.findall(_PORT, text)}
    return {} if facts.master_port is None or not ports or facts.master_port in ports else None


def stderr_matches(pattern: str) -> Predicate:
    """Return a predicate on the end of the worker's stderr, whatever the exception is."""
    return lambda end, _: _search(pattern, end.stderr_tail)


def _search(pattern: str, text: str, without: str = "") -> Found | None:
    """Return what `pattern` found in a text: the whole line, and each named group; None if nothing."""
    if not text:
        return None  # many workers say nothing, and to compile all patterns takes 6 ms of the end of a job
    text = searchable(text)
    if without:
        text = re.sub(without, "", text, flags=re.MULTILINE)
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        return None
    end = text.find("\n", match.end())
    line = text[text.rfind("\n", 0, match.end()) + 1 : end if end >= 0 else None]
    return {"line": line} | {name: found for name, found in match.groupdict().items() if found}


def killed_by(*signals: int) -> Predicate:
    """Return a predicate that fits an end by one of these signals, unless ddplaunch sent it.

    Only the last signal of a stop is known: before SIGKILL it was SIGTERM, mostly.
    """

    def fits(end: WorkerExit, _: Evidence) -> Found | None:
        sent = (SIGTERM, SIGKILL) if end.stopped_with == SIGKILL else (end.stopped_with,)
        return {} if end.signal in signals and end.signal not in sent else None

    return fits


def all_of(*predicates: Predicate) -> Predicate:
    """Return a predicate that fits where all of these do."""

    def fits(end: WorkerExit, facts: Evidence) -> Found | None:
        values: dict[str, str] = {}
        for predicate in predicates:
            if (found := predicate(end, facts)) is None:
                return None
            values |= found
        return values

    return fits


def fact(holds: Callable[[Evidence], bool]) -> Predicate:
    """Return a predicate on the facts about the node alone."""
    return lambda _, facts: {} if holds(facts) else None


def no_exception(end: WorkerExit, _: Evidence) -> Found | None:
    """Fit an end without an exception: a signal from outside raises none."""
    return {} if end.error is None else None


def lost_peer(end: WorkerExit, _: Evidence) -> Found | None:
    """Fit a failure that merely follows from another worker's."""
    return {} if follows_another(end) else None


# --- the table


# repeats are bounded, so that no text can make a search slow
_CHILD_KILLED = (
    r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) is killed by signal: Killed"
    r"|process pool was terminated abruptly|died with <Signals\.SIGKILL"
)
_DATALOADER_BUS = (
    r"DataLoader worker \(pid.{0,999}is killed by signal: Bus error|Unexpected bus error encountered in worker"
)
# multiprocessing's semaphores are files there
_NO_SHM = (
    r"(?:shared memory|\bshm|</?torch_).{0,199}No space left on device|\.SemLock\([^)]{0,199}No space left on device"
)
_NO_NAME = (
    r"Name or service not known|nodename nor servname|Temporary failure in name resolution"
    r"|No address associated with hostname|Name does not resolve"
)
_PORT_TAKEN = r"EADDRINUSE|[Aa]ddress already in use"
_NOT_OF_THE_BUILD = r"failed to map|Permission denied|Input/output error|Too many open files|Stale file handle"
_MISSING_MODULE = r"^(?:\[rank\d+\]: )?ModuleNotFoundError: No module named '(?P<module>[^']+)'"
# libraries that pip or conda brings, or the driver, not a package of the system
_OF_PACKAGES = r"lib(?:amdhip|c10|cu|gomp-|hip|hsa|iomp|mkl|nccl|nv|python|rccl|roc|torch)"

CAUSES: tuple[Row, ...] = (
    # the scheduler
    Row("preempted", all_of(fact(lambda facts: facts.ended_by == PREEMPTED), no_exception),
        "the scheduler preempted the job: requeue it and continue from the last checkpoint"),
    Row("out of walltime", all_of(fact(lambda facts: facts.ended_by == OUT_OF_WALLTIME), no_exception),
        "the time limit of the allocation was reached; ask for more time, or save a checkpoint before it ends"),
    # memory
    Row("out of memory",
        all_of(killed_by(SIGKILL), fact(lambda facts: facts.traces.oom_kills > 0 and not facts.traces.oom_kills_of_machine)),
        "the kernel's OOM killer ended it (its peak was {memory}; its cgroup counts {kills}): ask for more, "
        "or use fewer DataLoader workers"),
    Row("out of memory", all_of(killed_by(SIGKILL), fact(lambda facts: facts.traces.oom_kills > 0)),
        "the kernel's OOM killer was at work on this machine meanwhile ({kills}; the peak of this worker was {memory}): "
        "ask for more, or use fewer DataLoader workers", fault="memory"),
    Row("out of memory in a child process", all_of(matches(_CHILD_KILLED), fact(lambda facts: facts.traces.oom_kills > 0)),
        "the kernel's OOM killer ended a child process ({kills} meanwhile): ask for more memory, or use fewer of them "
        "(num_workers of a DataLoader)"),
    Row("device out of memory",
        matches(r"(?:CUDA|HIP|XPU) out of memory|(?:CUDA|HIP) error: out of memory|cudaErrorMemoryAllocation"),
        "{full} is full: a smaller batch per worker, or end other programs that use it (`nvidia-smi` lists them)"),
    Row("locked memory", matches(r"\bibv_\w{1,40}.{0,199}Cannot allocate memory"),
        "InfiniBand needs memory that stays in place, and the limit of it is used up: `ulimit -l unlimited`, or limits.conf(5)"),
    Row("host out of memory",
        matches(r"^(?:\[rank\d+\]: )?(?:\w+\.)*(?!OutOf)\w*MemoryError\b|DefaultCPUAllocator: .{0,999}allocate"
                r"|Cannot allocate memory"),
        "the machine, or the job's share of it, has no memory left: smaller batches, fewer workers, or ask for more"),
    Row("full /dev/shm", all_of(killed_by(SIGBUS), fact(lambda facts: facts.shm_full)),
        "/dev/shm is full ({shm}): make it larger (docker run --shm-size 8g), or lower num_workers"),
    Row("small /dev/shm", all_of(killed_by(SIGBUS), fact(lambda facts: facts.shm_small)),
        "/dev/shm is small ({shm} now), and who shares more memory there gets SIGBUS: docker run --shm-size 8g"),
    Row("full /dev/shm", code_matches(_NO_SHM),
        "/dev/shm is full ({shm} now): make it larger (docker run --shm-size 8g), or lower num_workers"),
    Row("bus error in a DataLoader worker", matches(_DATALOADER_BUS),
        "DataLoader workers pass batches through /dev/shm ({shm} now): make it larger (docker run --shm-size 8g), or "
        "lower num_workers"),
    Row("DataLoader worker killed", matches(r"DataLoader worker \(pid.{0,999}(?:is killed by signal|exited unexpectedly)"),
        "a DataLoader worker died, often for lack of memory: set num_workers=0 to see its own error here"),
    # a GPU, its driver, or a torch that does not fit them
    Row("CUDA after fork", matches(r"Cannot re-initialize (?:CUDA|XPU) in forked subprocess"),
        'the GPU was used before a fork: give the DataLoader multiprocessing_context="forkserver" (or "spawn")'),
    Row("invalid device ordinal",
        matches(r"invalid device ordinal|AssertionError: Invalid device id|device >= 0 && device < num_gpus"),
        "this worker has no such device, its own is {device}: use LOCAL_RANK; see `--pin` and `ddplaunch plan`"),
    Row("two workers on one GPU", matches(r"Duplicate GPU detected"),
        "NCCL needs a GPU for each worker: call torch.cuda.set_device(LOCAL_RANK) before init, or `--backend gloo`"),
    Row("backend not built in", matches(r"Distributed package doesn't have \w+ built in|ProcessGroupNCCL is only supported"),
        'this torch lacks it. In the script, type init_process_group("gloo")'),
    Row("torch without CUDA",
        matches(r"Torch not compiled with CUDA enabled|module 'torch\._C' has no attribute '_cuda_\w+'"),
        "the torch of {interpreter} is a CPU-only build: install a CUDA build, or run on the CPU"),
    Row("no driver", matches(r"Found no NVIDIA driver|No CUDA GPUs are available"),
        "the worker sees no GPU: check `nvidia-smi`, CUDA_VISIBLE_DEVICES and what the scheduler granted"),
    Row("fault in a GPU kernel",
        matches(r"an illegal memory access was encountered|device-side assert triggered|unspecified launch failure"),
        "the line shown may be a later one: `--env CUDA_LAUNCH_BLOCKING=1` makes the traceback exact"),
    Row("hardware fault of a GPU", matches(r"uncorrectable (?:ECC|NVLink) error|GPU is lost|fallen off the bus"),
        "the GPU itself has failed, not the script ({device} of this worker): see `nvidia-smi -q` and `dmesg | grep Xid`, "
        "and leave it out (`--devices`) until it is reset", fault="gpu"),
    Row("no kernel for this GPU", matches(r"no kernel image is available for execution on the device"),
        "the torch of {interpreter}, or a package with CUDA code, was not built for this kind of GPU: install another build"),
    Row("driver too old",
        matches(r"driver on your system is too old|driver version is insufficient for CUDA runtime version"),
        "the torch of {interpreter} needs a newer driver than this machine has: install a build for an older CUDA"),
    Row("GPU in use by others",
        matches(r"CUDA-capable device\(s\) is/are busy or unavailable|all CUDA-capable devices are busy or unavailable"),
        "another process has it, and it takes one only (`nvidia-smi -q -d COMPUTE`), or its driver hangs: take a free one "
        "(`--devices`)"),
    Row("GPUs not set up", matches(r"[Ee]rror 802: system not yet initialized|CUDA error: system not yet initialized"),
        "the node's GPUs are not set up: an administrator has to start nvidia-fabricmanager"),
    # the network
    Row("address in use", all_of(matches(_PORT_TAKEN), of_rendezvous, fact(lambda facts: facts.port_given)),
        "the port is taken: leave `--master-port` out and each job gets a free one of its own (MASTER_PORT)"),
    Row("address in use", all_of(matches(_PORT_TAKEN), of_rendezvous),
        "MASTER_PORT is taken, by the script itself or by a child of it: rank 0 needs it for init_process_group()"),
    Row("port of the script in use", matches(_PORT_TAKEN),
        "a port that the script listens at is taken, perhaps by another rank: let one rank listen, or add "
        "LOCAL_RANK to the port"),
    Row("host name resolves to loopback", matches(r"connectFullMesh failed.{0,999}\[127\.0\.(?:1\.\d+|0\.(?!1\])\d+)\]"),
        "a host's own name resolves to loopback: set GLOO_SOCKET_IFNAME to its network interface, or fix /etc/hosts"),
    Row("no such interface", matches(r"Unable to find address for: (?P<interface> {0,9}[^\s]{1,99})"),
        "GLOO_SOCKET_IFNAME takes whole names, and `{interface}` is none with an address here. "
        + WITHOUT_INTERFACE.format(variable="GLOO_SOCKET_IFNAME")),
    Row("no such interface", matches(r"\bno socket interface found"),
        "NCCL_SOCKET_IFNAME fits no interface of this host. " + WITHOUT_INTERFACE.format(variable="NCCL_SOCKET_IFNAME")),
    Row("unknown host", all_of(matches(_NO_NAME), of_rendezvous),
        "MASTER_ADDR is a name that is not known here: give an address (`--master-addr 10.0.0.1`), or fix /etc/hosts"),
    Row("own name unknown to gloo", matches(rf"gloo/transport/[\s\S]{{0,999}}(?:{_NO_NAME})"),
        "gloo does not find the address of this host's name: set GLOO_SOCKET_IFNAME to its network interface, or fix /etc/hosts"),
    Row("host of the script unknown", matches(_NO_NAME),
        "a name that the script connects to is not known here: on a node without internet, download the files before the job"),
    Row("unknown host",
        all_of(matches(r"client socket has timed out"), of_rendezvous, stderr_matches(rf"\[c10d\].{{0,499}}(?:{_NO_NAME})")),
        "MASTER_ADDR is a name that is not known here: give an address (`--master-addr 10.0.0.1`), or fix /etc/hosts"),
    Row("no libuv", matches(r"use_libuv was requested but PyTorch was buil[dt] without libuv"),
        "this torch has no libuv: `--env USE_LIBUV=0`"),
    # the script and its environment
    Row("disk full", matches(r"No space left on device|\(os error 28\)"),
        "a file system is full, in bytes or in files: `df -h` and `df -i` say which"),
    Row("quota used up", matches(r"Disk quota exceeded|\(os error 122\)"),
        "the quota of this user or project is used up: `quota -s`, or the cluster's own command, says which"),
    Row("file not written whole",
        matches(r"basic_ios::clear: iostream error|\bunexpected pos \d{1,20} vs \d|\b\d{1,20} requested and \d{1,20} written"),
        "a file could not be written whole, and the library does not say why: see `df -h`, `df -i` and your quota"),
    Row("too many open files on the machine", matches(r"Too many open files in system"),
        "all processes of the machine together have too many files open: an administrator can raise `sysctl fs.file-max`"),
    Row("too many open files", matches(r"Too many open files|received 0 items of ancdata"),
        "raise the hard limit (`ulimit -Hn`; ddplaunch raises the soft one to it), or try `--sharing-strategy file_system`"),
    Row("sender of a tensor has ended",
        code_matches(r"\A(FileNotFoundError|ConnectionRefusedError|ConnectionResetError|EOFError)\b"
                     r"[\s\S]*multiprocessing/resource_sharer\.py"),
        "the process that sent the tensor has ended: keep it running until the receiver has opened it, or send a copy "
        "(tensor.numpy())"),
    Row("module hidden",
        says_itself(r"^(?:\[rank\d+\]: )?ModuleNotFoundError: .{0,199}; '(?P<module>[^']+)' is not a package"),
        "a file {module}.py that is found before it hides the package `{module}`: give that file another name"),
    # \A: the failure itself; on the way to it a module may merely have been tried
    Row("system library not found", matches(rf"\A(?:Import|OS)Error: (?:.{{0,199}} )?(?!{_OF_PACKAGES})"
        r"(?P<library>[\w.+-]{1,99}?\.so[\w.]{0,20}): cannot open shared object file: No such file"),
        "the system, or the image of the container, has no {library}: install the package that brings it"),
    Row("module not found", says_itself(_MISSING_MODULE),
        "{interpreter} has no module `{module}`: install it there, or choose another with `--python`"),
    Row("broken library", says_itself(rf"^(?:\[rank\d+\]: )?ImportError: (?!.{{0,999}}(?:{_NOT_OF_THE_BUILD}))"
        r".{0,999}(?:undefined symbol|cannot open shared object|\.so\b)"),
        "a compiled package does not fit {interpreter} or its torch: reinstall it for this version"),
    Row("local rank expected as an argument",
        matches(r"the following arguments are required: .{0,999}--(?P<flag>local[-_]rank)"),
        "a script for torch.distributed.launch: add --{flag} '${{local_rank}}' after it, or let it read LOCAL_RANK"),
    Row("local rank not expected", matches(r"unrecognized arguments: .{0,999}--local[-_]rank"),
        "the script takes no local rank as an argument: leave it out, LOCAL_RANK is in the environment"),
    Row("no process group", matches(r"Default process group has not been initialized"),
        'call torch.distributed.init_process_group() before the first collective'),
    Row("collectives do not match",
        matches(r"Received data size doesn't match expected size|Detected mismatch between collectives on ranks"),
        "the ranks call different collectives: `ddplaunch check --world-size {workers} {program}` runs each alone, and names the "
        "lines"),
    # waiting for others; such failures follow another one too, and are reported only where no other worker failed
    Row("no store at MASTER_PORT", all_of(matches(r"client socket has timed out"), of_rendezvous),
        "rank 0 hosts it from init_process_group() on, or any worker of node 0 that connects to MASTER_PORT: none did in time"),
    Row("no store at another port", matches(r"client socket has timed out"),
        "no process listened at the address in the message in time: the one that hosts that store has ended, or comes too late"),
    Row("not all workers arrived",
        matches(r"waiting for clients\. \d+/\d+ clients joined|Timed out initializing process group"
        r"|store->get\('[^']{1,99}'\) got error: .{0,999}[Tt]imeout"),
        "some rank did not call init_process_group in time: it ended early, or was busy for longer than the timeout"),
    Row("collective timed out",
        matches(r"Timed out waiting \d+ms for \w+ operation|Watchdog caught collective operation timeout"
        r"|failed to pass monitoredBarrier|wait timeout after \d+ms|due to a collective timeout"
        r"|\bDist(?:Network|Store)Error: .{0,199}Socket Timeout|Socket Timeout\s+Exception raised from"),
        "a rank did not call the same collective: it hangs, is slow, or took another branch in the script"),
    Row("peer lost", lost_peer,
        "a worker ended while others still needed it: see that all ranks do the same number of steps (uneven data?)"),
    # signals whose cause is not known
    Row("bus error", killed_by(SIGBUS),
        "it used memory whose file was cut short or lies on a full disk, or shared memory without room for it "
        "(/dev/shm has {shm})"),
    # torch 2.4 to 2.13, in each program with DDP over gloo
    Row("crash of torch's own checks",
        all_of(killed_by(SIGSEGV), stderr_matches(r'torch/nn/parallel/distributed\.py", line \d{1,9} in _ddp_init_helper$')),
        "torch crashes there under TORCH_DISTRIBUTED_DEBUG=DETAIL: leave that out, and compare the collectives by "
        "`ddplaunch check --world-size {workers} {program}`"),
    Row("segmentation fault", killed_by(SIGSEGV),
        "a crash in compiled code: look for a package built for another torch, CUDA or NumPy at the top of the stack"),
    Row("illegal instruction", killed_by(SIGILL),
        "a package was built for another kind of CPU: reinstall it, or build it, on this machine"),
    # a C++ thread that was not joined; torch 2.13 sometimes aborts so with a gloo group that was left open
    Row("aborted at its end",
        all_of(killed_by(SIGABRT), no_exception, stderr_matches(r"terminate called without an active exception")),
        "threads of compiled code still ran when it ended: call torch.distributed.destroy_process_group() before that, "
        "and import torch.distributed.nn before init_process_group(), or it holds the group (a bug of torch)"),
    Row("aborted", all_of(killed_by(SIGABRT), no_exception),
        "compiled code called abort(); the reason is in the last stderr output"),
    Row("killed by --chaos", all_of(killed_by(SIGKILL), fact(lambda facts: facts.chaos)),
        "--chaos killed it, as it was asked to"),
    Row("killed from outside", killed_by(SIGKILL),
        "SIGKILL came from outside, not from ddplaunch: the kernel's OOM killer (`dmesg`), the scheduler, a user"),
    Row("no terminal",
        all_of(says_itself(r"\bbdb\.BdbQuit\b|^(?:\[rank\d+\]: )?EOFError: EOF when reading a line"),
               fact(lambda facts: facts.workers > 1 and not facts.debugging)),
        "no terminal for several ranks: `ddplaunch --debug {rank} ...` gives it to this one, for breakpoint() and input()"),
    Row("debugger quit", says_itself(r"\bbdb\.BdbQuit\b"),
        "the debugger was quit, and that ends the worker; `c` lets it go on, and without breakpoint() there is no prompt"),
    Row("stopped from outside", killed_by(SIGTERM, SIGINT, SIGHUP, SIGQUIT),
        "{signal} came from outside, not from ddplaunch: the scheduler, or a user"),
)  # fmt: skip


class Cause(Struct, frozen=True, kw_only=True):
    """The cause of a failure, and what to do about it."""

    name: str
    advice: str  # one line
    line: str = ""  # of what the worker said, as evidence; "" if that is a fact of the node
    fault: str = ""  # as in `Row`


def classify(end: WorkerExit, facts: Evidence) -> Cause | None:
    """Return the cause of a failure by the first row of the table that fits; None if no row fits."""
    shm_size, shm_free = facts.traces.shm or (0, 0)
    values = {
        "device": end.device,
        "rank": end.rank,
        "workers": facts.workers,
        "program": facts.program,
        "full": end.device if end.device != "cpu" else "a GPU, which ddplaunch gave no worker,",  # whose memory is full
        "signal": signal_name(end.signal or 0),
        "memory": size(end.peak_rss),
        "kills": count(facts.traces.oom_kills, "kill"),
        "interpreter": facts.interpreter or "the workers' Python",
        "shm": f"{size(shm_free)} of {size(shm_size)} free",
    }
    for row in CAUSES:
        found = row.predicate(end, facts)
        if found is not None:
            advice = row.advice.format(**values | dict(found))
            return Cause(name=row.name, advice=advice, line=found.get("line", ""), fault=row.fault)
    return None
