"""Runs torch's profiler in a worker, for a client of `ddplaunch profile` at the other end of a socket. Loaded when needed.

torch's profiler belongs to the thread that starts it. So the main thread starts and stops the profiler, between two instructions
of its program, when our thread sends it the signal. It never does so below a call of `backward`, which puts the state of its
thread back when it returns. Our thread does all else: it talks to the client, samples where the main thread is, reads torch's
recorders, and sends the trace.

The client sends lines of JSON, we send frames: of JSON, or of a byte that says what follows and a compressed piece of that. In
order: {"type": "profile"}; we report the phase "hello". Any number of "ping", each answered by a list, [number, time]. "begin";
we report "recording". "count" once all ranks record: steps count from then on. "end", unless all steps are done; we report
"made". "send"; we send the pieces, then report "sent". In place of any of these we may report "failed".
"""

import _thread
import atexit
import json
import os
import select
import signal
import socket
import sys
import time
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

OLDEST = (2, 4)  # of torch
CLIENT_TIMEOUT = 120.0  # seconds after which a client that says nothing is given up
COLLECTING_TIMEOUT = 3600.0  # seconds for the client to fetch what others have recorded
START_TIMEOUT = 20.0  # seconds in which the main thread has to come by for the start
LONGEST_PROFILE = 900.0  # seconds of a profile
INCOMPLETE_STEPS = (
    2  # of those that are counted: the first had begun before, and the last may end later on another rank
)
SAMPLE_INTERVAL = 0.02  # seconds between two looks at the main thread
READ_INTERVAL = 0.5  # seconds between two readings of the recorders, less where collectives are many
ENTRIES_PER_READING = 250  # entries that a reading should find: recorders keep 500
MOST_RECORDED = 100_000  # samples, and entries of recorders
GROWTH_LIMIT = 1 << 30  # bytes by which the worker may grow
ROOM_WANTED = 2 << 30  # bytes that a folder for the trace should have free
PIECE = 1 << 18  # bytes that are compressed at once
LONGEST_LINE = 1 << 16  # bytes of what the client says
# torch's functions that give what its flight recorders hold
RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
FILES_OF_BACKWARD = ("torch/autograd/__init__.py", "torch/autograd/graph.py")  # in which it calls C++
# how a frame with a compressed piece of the trace, or a piece of the allocator's history, begins
OF_TRACE, OF_MEMORY = b"\0", b"\1"


class Refused(Exception):
    """The profile cannot be: why, as a predicate."""


def begin(sock: socket.socket, before: "Profile | None", signum: int) -> "Profile":
    """Return the profile for a client, which runs in a thread of its own; `before` if that one goes on, so that there is none."""
    profile = Profile(sock, signum)
    if before is not None and before.is_open:
        profile.fail("is being profiled already")
        return before
    _thread.start_new_thread(profile.run, ())  # not by `threading`: the main thread may hold a lock of it
    return profile


FOLDERS = (os.path.dirname(os.__file__), os.path.dirname(begin.__code__.co_filename), "<frozen")


class Profile:
    """One profile of this worker. The signal handler calls `on_signal` in the main thread; `run` is what our own thread does."""

    def __init__(self, sock: socket.socket, signum: int) -> None:
        """Be made in the main thread, for the client at `sock`; `signum` is the signal by which that thread is asked."""
        sock.setblocking(True)
        self.sock = sock
        self.signum = signum
        self.main_thread = _thread.get_ident()
        self.worker = os.getpid()
        self.is_open = True  # until our thread ends
        self.received = b""  # from the client, not read yet
        self.due_in_main: list[Callable[[], None]] = []  # what the main thread is to call: one function or none
        self.came_too_early = False  # the main thread had the signal below `backward`, and has called nothing
        self.profiler: Any = None  # torch's, while it records
        self.autograd_profiler: Any = None  # torch.autograd.profiler
        self.torch_record: Any = None  # once the profiler is stopped
        self.steps = 0  # of the optimizer
        self.optimizer = 0  # id of the one whose steps are counted: the first that has done one
        self.first_progress = -1  # the step at which `progress()` was when its steps were first asked for
        # of the main thread: since when, until when (time of day, ns), FILE:LINE
        self.samples: list[list[Any]] = []
        self.entries: list[Any] = []  # of torch's recorders: collectives
        self.newest_ids = dict.fromkeys(RECORDERS, -1)  # of the entries that were read, by recorder
        self.times: dict[str, int] = {}  # ns of the time of day; with `mono` in the name, of CLOCK_MONOTONIC

    # --- in the main thread

    def on_signal(self, frame: "FrameType | None") -> bool:
        """Call, in the main thread, what our thread wants called, unless `backward` runs; return whether it wants anything."""
        if not self.due_in_main:
            return False
        while frame is not None:
            if frame.f_code.co_filename.endswith(FILES_OF_BACKWARD):  # at its end it would undo a start or stop
                self.came_too_early = True
                return True
            frame = frame.f_back
        try:
            call = self.due_in_main.pop()
        except IndexError:  # our thread has given up meanwhile
            return True
        call()
        return True

    def start(self) -> None:
        """Start torch's profiler, in the main thread."""
        torch = sys.modules["torch"]
        module: Any = sys.modules["torch.autograd.profiler"]
        if torch._C._autograd._profiler_enabled():
            raise Refused("is being profiled by its own program")
        imported = (name for name in ("cuda", "xpu") if f"torch.{name}" in sys.modules)
        device = next((name for name in imported if getattr(torch, name).is_initialized()), None)  # None: CPU alone
        profiler = module.profile(use_cpu=True, use_kineto=True, use_device=device)
        self.times.update(asked=time.time_ns(), mono_asked=time.monotonic_ns())
        profiler._prepare_trace()
        profiler._start_trace()
        self.autograd_profiler, self.profiler = module, profiler
        self.times["began"] = time.time_ns()

    def stop(self) -> None:
        """Stop torch's profiler, and keep its record. Do not wait for kernels of GPUs, which other ranks may have to reach."""
        self.times["ended"] = time.time_ns()
        profiler, self.profiler = self.profiler, None
        if profiler is not None:
            try:
                self.torch_record = self.autograd_profiler._disable_profiler()
            finally:
                self.autograd_profiler._run_on_profiler_stop()
        self.times.update(stopped=time.time_ns(), mono_stopped=time.monotonic_ns())

    def at_exit(self) -> None:
        """Stop the profiler at the end of the program: torch crashes where it still runs then."""
        if self.profiler is not None and os.getpid() == self.worker:
            self.stop()
            self.torch_record = None

    def on_step(self, optimizer: "Any", _args: "Any", _kwargs: "Any") -> None:
        """Count the steps of the first optimizer, and do what is due: no `backward` runs here, mostly."""
        self.optimizer = self.optimizer or id(optimizer)
        if self.optimizer == id(optimizer):
            self.steps += 1
        if _thread.get_ident() == self.main_thread:
            self.on_signal(sys._getframe())

    def forget(self) -> None:
        """Leave the profile to the worker, in a child that it has forked: nothing there would ever stop recording."""
        if self.is_open:
            self.is_open = False
            self.sock.close()
            if self.profiler is not None:
                sys.modules["torch"]._C._autograd._enable_record_function(False)

    # --- in our thread

    def run(self) -> None:
        """Serve the client until it has all or leaves. Whatever happens, the profiler is stopped."""
        try:
            try:
                self.serve()
            except Refused as error:
                self.fail(str(error))
            except (OSError, EOFError):
                pass  # the client has left
            except MemoryError:
                self.fail("has no memory left for the profile")
            except Exception as error:  # noqa: BLE001 - whatever it is, the program goes on
                self.fail(f"could not be profiled: {described(error)}")
            if self.profiler is not None:
                self.call_in_main(self.stop)
        finally:
            self.is_open = False
            self.torch_record = None
            atexit.unregister(self.at_exit)
            self.sock.close()

    def call_in_main(self, function: "Callable[[], object]", until: "float | None" = None) -> None:
        """Have the main thread call a function, and wait for the end of that; raise what the function raises.

        `until` (monotonic seconds) is the limit to begin with that, None: as long as it takes. Raises Refused: it has not begun.
        """
        outcome: list[Exception | None] = []  # what the function has raised or None, once it has ended

        def guarded() -> None:
            try:
                function()
                outcome.append(None)
            except Exception as error:  # noqa: BLE001 - it would be raised in the program
                outcome.append(error)

        self.came_too_early = False
        self.due_in_main.append(guarded)
        signal.pthread_kill(self.main_thread, self.signum)
        pause = 0.001
        while not outcome:
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            if self.came_too_early:  # ask again soon: the main thread may be outside of `backward` for moments only
                self.came_too_early, pause = False, 0.001
                signal.pthread_kill(self.main_thread, self.signum)
            if until is not None and time.monotonic() >= until:
                try:
                    self.due_in_main.remove(guarded)
                except ValueError:
                    until = None  # the main thread is calling it just now: wait for the end
                else:
                    raise Refused("runs no Python in its main thread just now")
        if outcome[0] is not None:
            raise outcome[0]

    def serve(self) -> None:
        """Answer "hello", record from "begin" to "end", and send the trace. Raises Refused; OSError, EOFError: it has left."""
        wish = self.next_message(CLIENT_TIMEOUT)
        torch: Any = sys.modules.get("torch")
        wants_memory = wish.get("memory") is True  # the history of the allocator
        why_no_memory = why_no_memory_history(torch) if wants_memory else ""  # "": there will be one
        self.report("hello", boot_id=boot_id(), why_no_memory=why_no_memory)
        if self.next_but_pings(CLIENT_TIMEOUT).get("type") != "begin":
            raise EOFError
        if why := why_not_profiled(torch):
            raise Refused(why)
        keeps_memory = wants_memory and not why_no_memory_history(torch)  # CUDA may have been started since
        self.read_recorders()
        steps = int(wish.get("steps") or 0)
        optimizers = sys.modules.get("torch.optim.optimizer")
        hook = None
        try:
            if optimizers is not None:
                hook = optimizers.register_optimizer_step_post_hook(self.on_step)
            if keeps_memory:
                torch.cuda.memory._record_memory_history(max_entries=MOST_RECORDED)
            atexit.register(self.at_exit)
            self.call_in_main(self.start, time.monotonic() + START_TIMEOUT)
            self.steps = 0  # some may have gone by before the profiler started
            self.report("recording")
            why_less = self.record(steps)
            self.call_in_main(self.stop)
            self.read_recorders()
            memory = pickled_memory(torch) if keeps_memory else b""
        finally:
            if hook is not None:
                hook.remove()
            if keeps_memory:
                torch.cuda.memory._record_memory_history(enabled=None)
        self.send_trace(why_less, memory)

    def record(self, steps: int) -> str:
        """Record until the client ends the profile or `steps` (0: no limit) are recorded; return why it ended earlier, else "".

        They count once all ranks record, and more than that have to end, so that all ranks have recorded as many whole ones.
        """
        began = read_at = time.monotonic()
        pause, memory_before = READ_INTERVAL, resident()
        last_step = None  # with which it ends; None: not yet known, or no limit
        while True:
            try:
                message = self.next_message(SAMPLE_INTERVAL)
            except TimeoutError:  # the client has said nothing
                message = {}
            if message.get("type") == "ping":
                self.pong(message)
            elif message.get("type") == "count" and steps:
                last_step = self.steps_done() + steps + INCOMPLETE_STEPS
            elif message.get("type") == "end" or (last_step is not None and self.steps_done() >= last_step):
                return ""
            now = time.monotonic()
            if now - began >= LONGEST_PROFILE:
                return f"stopped after {LONGEST_PROFILE:.0f} s, the longest time that is recorded"
            self.sample_main_thread()
            if now - read_at >= pause:
                read_at = now
                entries = self.read_recorders()
                # at that rate, ENTRIES_PER_READING entries till the next reading
                pause = min(READ_INTERVAL, max(SAMPLE_INTERVAL, pause * ENTRIES_PER_READING / max(1, entries)))
                if resident() - memory_before > GROWTH_LIMIT:
                    return f"stopped after {now - began:.1f} s: it took {GROWTH_LIMIT >> 20} MiB of memory"

    def steps_done(self) -> int:
        """Return how many steps are done: of an optimizer, or as the program says by `progress()` where it has none."""
        file = getattr(sys.modules.get("ddplaunch.worker.progress"), "_file", None)
        if self.optimizer or file is None:
            return self.steps
        if self.first_progress < 0:
            self.first_progress = file.step
        return int(file.step - self.first_progress)

    def sample_main_thread(self) -> None:
        """Note where the main thread is: at the innermost line that is of no library."""
        innermost = frame = sys._current_frames().get(self.main_thread)
        while frame is not None and is_library(frame.f_code.co_filename):
            frame = frame.f_back
        frame = frame or innermost
        if frame is None or len(self.samples) >= MOST_RECORDED:
            return
        where = f"{frame.f_code.co_filename[:500]}:{frame.f_lineno}"
        now = time.time_ns()
        if self.samples and self.samples[-1][2] == where:
            self.samples[-1][1] = now
        else:
            self.samples.append([now, now, where])

    def read_recorders(self) -> int:
        """Keep what torch's recorders know of collectives that was not read before; return how many."""
        module = sys.modules.get("torch._C._distributed_c10d")
        before = len(self.entries)
        for name in RECORDERS:
            dump = getattr(module, name, None)
            if dump is None:
                continue
            try:
                entries = json.loads(dump()).get("entries") or []
                new = [entry for entry in entries if entry["record_id"] > self.newest_ids[name]]
            except Exception:  # noqa: BLE001 - not the recorder that we know
                continue
            if new:
                self.newest_ids[name] = new[-1]["record_id"]
                self.entries += new[: MOST_RECORDED - len(self.entries)]
        return len(self.entries) - before

    def send_trace(self, why_less: str, memory: bytes) -> None:
        """Report that the trace is made, and why early, and send trace and `memory` when the client asks for them.

        `memory` is the pickled history of the allocator, b"" if none was kept.
        """
        result, self.torch_record = self.torch_record, None
        with saved(result) as file:
            del result  # torch's record may be large, and is in the file now
            self.times["saved"] = time.time_ns()
            size = os.fstat(file.fileno()).st_size
            self.report("made", size=size, why_less=why_less)
            if self.next_but_pings(COLLECTING_TIMEOUT).get("type") != "send":
                raise EOFError
            packer = zlib.compressobj(1)
            header = {
                "times": self.times,
                "samples": self.samples,
                "entries": self.entries,
                "groups": groups_of_torch(),
            }
            self.send_frame(OF_TRACE, packer.compress(json.dumps(header).encode() + b"\n"))
            while piece := file.read(PIECE):
                self.send_frame(OF_TRACE, packer.compress(piece))
            self.send_frame(OF_TRACE, packer.flush())
        for at in range(0, len(memory), PIECE):
            self.send_frame(OF_MEMORY, memory[at : at + PIECE])
        self.report("sent")

    # --- the connection

    def next_message(self, within: float) -> "dict[str, Any]":
        """Return the client's next message, {} for nonsense. Raises TimeoutError, and EOFError once the client has left."""
        until = time.monotonic() + within
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        while b"\n" not in self.received:
            left = until - time.monotonic()
            if left <= 0 or not poll.poll(max(1, int(left * 1000))):
                raise TimeoutError
            data = self.sock.recv(LONGEST_LINE)
            self.received += data
            if not data or len(self.received) > LONGEST_LINE:
                raise EOFError
        line, _, self.received = self.received.partition(b"\n")
        message = json.loads(line)
        return message if isinstance(message, dict) else {}

    def next_but_pings(self, within: float) -> "dict[str, Any]":
        """Return the client's next message that is no ping, and answer pings, each within so many seconds."""
        while (message := self.next_message(within)).get("type") == "ping":
            self.pong(message)
        return message

    def pong(self, message: "dict[str, Any]") -> None:
        """Answer a ping: say what time it is here."""
        self.send_frame(json.dumps([message.get("number", 0), time.time_ns()]).encode())

    def report(self, phase: str, **fields: "Any") -> None:
        """Report the phase to which this worker has come; `fields` are as in `_Report` of tools/profile/ranks.py."""
        self.send_frame(json.dumps({"phase": phase, **fields}).encode())

    def send_frame(self, *pieces: bytes) -> None:
        """Send a frame; give up a client that takes nothing for long."""
        payload = b"".join(pieces)
        self.sock.settimeout(CLIENT_TIMEOUT)
        self.sock.sendall(len(payload).to_bytes(4, "big") + payload, socket.MSG_NOSIGNAL)

    def fail(self, why: str) -> None:
        """Say why there is no profile, and end the connection."""
        try:
            self.report("failed", why=why[:500])
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def why_not_profiled(torch: "Any") -> str:
    """Return why this worker cannot be profiled, as a predicate of the rank: "has not imported torch"; "" if it can."""
    if torch is None:
        return "has not imported torch"
    try:
        version = tuple(int(part) for part in str(torch.__version__).split(".")[:2])
        has_profiler = torch._C._autograd._supported_activities and torch.autograd.kineto_available()
    except (AttributeError, ValueError):
        return "has not imported torch to the end, or has a torch that is built without a profiler"
    if version < OLDEST:
        return f"has torch {torch.__version__}, and a profile needs {'.'.join(map(str, OLDEST))}"
    return "" if has_profiler else "has a torch that is built without the profiler (Kineto)"


def why_no_memory_history(torch: "Any") -> str:
    """Return why there is no history of the allocator, as a predicate; "" if there is."""
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return "uses no CUDA, and torch keeps a history of that allocator alone"
    return (
        "" if hasattr(torch.cuda.memory, "_record_memory_history") else "has a torch without a history of its allocator"
    )


def pickled_memory(torch: "Any") -> bytes:
    """Return the history of the allocator, as torch's viewer reads it."""
    import pickle

    return pickle.dumps(torch.cuda.memory._snapshot())


def groups_of_torch() -> "dict[str, int]":
    """Return the number of ranks of each process group by its name."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        table: Any = module._pg_group_ranks  # type: ignore[union-attr]
        return {str(group.group_name): len(ranks) for group, ranks in list(table.items())[:MOST_RECORDED]}
    except Exception:  # noqa: BLE001 - not the torch that we know
        return {}


def saved(result: "Any") -> "Any":
    """Return the trace that torch writes of its record, as an open file without a name.

    torch makes a second file beside it, and cannot do with a descriptor. The folder of the agent's error files, which is in
    memory mostly and is removed with the job, goes before that for temporary files, unless it has too little room.
    """
    import shutil
    import tempfile

    folders = [os.path.dirname(os.environ.get("TORCHELASTIC_ERROR_FILE", "")), tempfile.gettempdir()]
    folder = next((folder for folder in folders if room_in(folder) > ROOM_WANTED), folders[-1])
    own = ""
    try:
        own = tempfile.mkdtemp(prefix="ddplaunch-profile-", dir=folder)  # nobody else can put a link at the path in it
        result.save(f"{own}/trace.json")
        return open(f"{own}/trace.json", "rb")
    except OSError as error:
        raise Refused(f"could not write its trace to {folder}: {error.strerror}") from None
    finally:
        if own:
            shutil.rmtree(own, ignore_errors=True)


def room_in(folder: str) -> int:
    """Return how many bytes there is room for in a folder."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def is_library(name: str) -> bool:
    """Whether a file is Python's, ours, or installed."""
    return name.startswith(FOLDERS) or "/site-packages/" in name or "/dist-packages/" in name


def resident() -> int:
    """Return the bytes of memory that this process uses."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def boot_id() -> str:
    """Return what all processes have in common that share a clock; "" if that is not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def described(error: Exception) -> str:
    """Write an exception in one line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
