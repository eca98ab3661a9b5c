"""Each row of the table, with a text that the thing itself has written."""

import re
from signal import SIGABRT, SIGBUS, SIGHUP, SIGILL, SIGINT, SIGKILL, SIGSEGV, SIGTERM, SIGUSR1
from typing import Any

import pytest
from msgspec.structs import replace

from ddplaunch.launcher.decide.first_failure import follows_another
from ddplaunch.launcher.tell.causes import CAUSES, Evidence, classify
from ddplaunch.spec.outcome import OUT_OF_WALLTIME, PREEMPTED, WorkerError, WorkerExit
from tests.unit.builders import of_node, worker_exit

GIB = 1024**3


def raised(kind: str, message: str, led_to_by: str = "") -> WorkerExit:
    """End a worker by an exception, with the text of an earlier one that led to it."""
    return end(error=WorkerError(type=kind, message=message, traceback=f"{led_to_by}\n{kind}: {message}\n"))


def end(
    code: int = 1,
    signal: int | None = None,
    *,
    error: WorkerError | None = None,
    tail: str = "",
    stopped_with: int | None = None,
) -> WorkerExit:
    card = {"pid": 4711, "device": "cuda:3", "peak_rss": 61 * GIB}
    return worker_exit(3, code, signal, at=10.0, error=error, stderr_tail=tail, stopped_with=stopped_with, **card)


def _argparse(message: str) -> WorkerExit:
    return end(
        2,
        error=WorkerError(type="SystemExit", message="2", traceback=""),
        tail=f"usage: train.py [-h]\ntrain.py: error: {message}\n",
    )


ROWS: list[tuple[Any, ...]] = [  # a cause, a death, and the facts where there are any
    ("preempted", end(signal=SIGTERM), Evidence(ended_by=PREEMPTED)),
    ("out of walltime", end(signal=SIGKILL), Evidence(ended_by=OUT_OF_WALLTIME)),
    ("out of memory", end(signal=SIGKILL), of_node(oom_kills=1)),
    ("out of memory", end(signal=SIGKILL), of_node(oom_kills=1, oom_kills_of_machine=True)),
    ("out of memory in a child process",
        raised("RuntimeError", "DataLoader worker (pid(s) 7100) exited unexpectedly",
        "RuntimeError: DataLoader worker (pid 7100) is killed by signal: Killed. "), of_node(oom_kills=1)),
    ("device out of memory",
        raised("torch.OutOfMemoryError",
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.10 GiB of which 1.02 GiB"
        " is free. Process 4711 has 78.07 GiB memory in use.")),
    ("host out of memory",
        raised("RuntimeError",
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
        " allocate 4503599627370496 bytes. Error code 12 (Cannot allocate memory)")),
    ("host out of memory",
        raised("numpy._core._exceptions._ArrayMemoryError", "Unable to allocate 8.00 EiB for an array")),
    ("full /dev/shm", end(signal=SIGBUS), of_node(shm=(8 * GIB, 4096))),
    ("small /dev/shm", end(signal=SIGBUS), of_node(shm=(64 * 1024**2, 60 * 1024**2))),
    ("bus error in a DataLoader worker",
        raised("RuntimeError",
        "DataLoader worker (pid 46794) is killed by signal: Bus error. It is possible that dataloader's workers are"
        " out of shared memory. Please try to raise your shared memory limit.")),
    ("full /dev/shm",
        raised("OSError", "[Errno 28] No space left on device",
        '  File "/usr/lib/python3.11/multiprocessing/synchronize.py", line 57, in __init__\n'
        "    sl = self._semlock = _multiprocessing.SemLock(\n                         ^^^^^^^^^^^^^^^^^^^^^^^^^")),
    ("full /dev/shm",
        raised("RuntimeError", "unable to write to file </torch_4711_1804289383_0>: No space left on device (28)")),
    ("DataLoader worker killed", raised("RuntimeError", "DataLoader worker (pid(s) 7100) exited unexpectedly")),
    ("CUDA after fork",
        raised("RuntimeError",
        "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn'"
        " start method")),
    ("invalid device ordinal",
        raised("torch.AcceleratorError",
        "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?")),
    ("two workers on one GPU",
        raised("torch.distributed.DistBackendError",
        "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, invalid usage (run with NCCL_DEBUG=WARN"
        " for details), NCCL version 2.20.5\nncclInvalidUsage: This usually reflects invalid usage of NCCL library."
        "\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 10")),
    ("backend not built in", raised("RuntimeError", "Distributed package doesn't have NCCL built in")),
    ("backend not built in", raised("ValueError", "ProcessGroupNCCL is only supported with GPUs, no GPUs found!")),
    ("torch without CUDA", raised("AssertionError", "Torch not compiled with CUDA enabled")),
    ("torch without CUDA", raised("AttributeError", "module 'torch._C' has no attribute '_cuda_setDevice'")),
    ("no driver",
        raised("RuntimeError", "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU")),
    ("no driver", raised("RuntimeError", "No CUDA GPUs are available")),
    ("fault in a GPU kernel",
        end(signal=SIGABRT,
        tail="[rank3]:[E626 06:24:44.90 ProcessGroupNCCL.cpp:1895] [PG ID 0 Rank 3] Process group watchdog thread"
        " terminated with exception: CUDA error: an illegal memory access was encountered\n")),
    ("port of the script in use", raised("OSError", "[Errno 98] Address already in use")),
    ("address in use",
        raised("torch.distributed.DistNetworkError",
        "The server socket has failed to listen on any local network address. port: 59851, useIpv6: false,"
        " code: -98, name: EADDRINUSE, message: address already in use")),
    ("no such interface", raised("RuntimeError", "ifa != nullptr. Unable to find address for: ^lo")),
    ("no such interface", raised("RuntimeError", "ifa != nullptr. Unable to find address for:  lo")),
    ("no such interface",  # NCCL's bootstrap.cc
        raised("torch.distributed.DistBackendError",
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, internal error - please report this issue to the"
        " NCCL developers, NCCL version 2.26.2\nLast error:\nBootstrap : no socket interface found")),
    ("host name resolves to loopback",
        raised("RuntimeError",
        "Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:152] timed out"
        " connecting: SO_ERROR: Connection refused, remote=[127.0.1.1]:20901")),
    ("host of the script unknown", raised("socket.gaierror", "[Errno -2] Name or service not known")),
    ("own name unknown to gloo",
        raised("RuntimeError",
        "[enforce fail at gloo/transport/tcp/device.cc:84] rv != -1. Name or service not known")),
    ("unknown host",
        raised("torch.distributed.DistNetworkError",
        "The IPv4 network addresses of (a, 1): Name or service not known")),
    ("locked memory", raised("RuntimeError", "Call to ibv_create_cq failed with error Cannot allocate memory")),
    ("no store at another port",
        raised("torch.distributed.DistNetworkError", "The client socket has timed out: connect to (10.0.0.1, 1234)."),
        Evidence(master_port=51771)),
    ("unknown host",
        end(error=WorkerError(type="torch.distributed.DistNetworkError",
        message="The client socket has timed out after 5000ms while trying to connect to (gpu1.invalid, 1234).",
        traceback=""),
        tail="[W1121 05:55:22.439529947 socket.cpp:764] [c10d] The IPv6 network addresses of (gpu1.invalid, 1234)"
        " cannot be retrieved (gai error: -2 - Name or service not known).\n")),
    ("no libuv",
        raised("torch.distributed.DistStoreError",
        "use_libuv was requested but PyTorch was built without libuv support, run with USE_LIBUV=0 to disable it.")),
    ("hardware fault of a GPU",
        raised("RuntimeError",
        "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported at some"
        " other API call, so the stacktrace below might be incorrect.")),
    ("hardware fault of a GPU",
        end(signal=SIGABRT,
        tail="terminate called after throwing an instance of 'c10::AcceleratorError'\n  what():  CUDA error:"
        " uncorrectable ECC error encountered\n")),
    ("no kernel for this GPU",
        raised("RuntimeError", "CUDA error: no kernel image is available for execution on the device")),
    ("driver too old",
        raised("RuntimeError",
        "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading"
        " and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx")),
    ("GPU in use by others", raised("RuntimeError", "CUDA error: CUDA-capable device(s) is/are busy or unavailable")),
    ("GPUs not set up",
        raised("RuntimeError",
        "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices()"
        " that might have already set an error? Error 802: system not yet initialized")),
    ("disk full", raised("OSError", "[Errno 28] No space left on device")),
    ("disk full", raised("RuntimeError", "write(): fd 3 failed with No space left on device")),
    ("disk full",
        raised("safetensors._safetensors_rust.SafetensorError",
        "Error while serializing: I/O error: No space left on device (os error 28)")),
    ("disk full",
        raised("RuntimeError", "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598",
        "OSError: [Errno 28] No space left on device")),
    ("quota used up", raised("OSError", "[Errno 122] Disk quota exceeded: 'checkpoint.pt'")),
    ("file not written whole",
        raised("RuntimeError", "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598",
        "RuntimeError: basic_ios::clear: iostream error")),
    ("file not written whole", raised("OSError", "1048576 requested and 262112 written")),
    ("too many open files on the machine", raised("OSError", "[Errno 23] Too many open files in system: '/dev/null'")),
    ("too many open files", raised("OSError", "[Errno 24] Too many open files: '/dev/null'")),
    ("too many open files", raised("RuntimeError", "received 0 items of ancdata")),
    ("sender of a tensor has ended",
        raised("ConnectionRefusedError", "[Errno 111] Connection refused",
        '  File "/usr/lib/python3.11/multiprocessing/resource_sharer.py", line 57, in detach\n')),
    ("module hidden", raised("ModuleNotFoundError", "No module named 'torch.distributed'; 'torch' is not a package")),
    ("system library not found",
        raised("ImportError", "libGL.so.1: cannot open shared object file: No such file or directory")),
    ("system library not found",
        raised("OSError",
        "cannot load library 'libsndfile.so': libsndfile.so: cannot open shared object file: No such file or directory",
        "ModuleNotFoundError: No module named '_soundfile_data'")),
    ("module not found", raised("ModuleNotFoundError", "No module named 'torchvision'")),
    (
        "module not found",  # one that was tried before it lacks a library
        raised(
            "ModuleNotFoundError",
            "No module named 'torchvision'",
            "ImportError: libGL.so.1: cannot open shared object file: No such file or directory",
        ),
    ),
    *(("broken library",
        raised("ImportError",
        f"{library}: cannot open shared object file: No such file or directory")) for library in ("libcudart.so.12",
        "libnccl.so.2", "libmkl_core.so.2", "libamdhip64.so.6", "libpython3.11.so.1.0")),
    ("local rank expected as an argument", _argparse("the following arguments are required: --local_rank")),
    ("local rank not expected", _argparse("unrecognized arguments: --local-rank=0")),
    ("no process group",
        raised("ValueError",
        "Default process group has not been initialized, please make sure to call init_process_group.")),
    ("collectives do not match",
        end(signal=SIGABRT,
        tail="terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail at"
        " /__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes."
        " 8 vs 4. Received data size doesn't match expected size. Is there a distributed collective mismatch in"
        " your code?\n")),
    ("not all workers arrived",
        raised("torch.distributed.DistStoreError",
        "Timed out after 6 seconds waiting for clients. 1/2 clients joined.")),
    ("no store at MASTER_PORT",
        raised("torch.distributed.DistNetworkError",
        "The client socket has timed out after 5000ms while trying to connect to (127.0.0.1, 51771).")),
    ("collective timed out",
        raised("RuntimeError",
        "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms"
        " for recv operation to complete")),
    ("collective timed out",
        end(signal=SIGABRT,
        tail="[rank1]:[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective"
        " operation timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600020"
        " milliseconds before timing out.\n")),
    ("peer lost",
        raised("RuntimeError",
        "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
        " [127.0.0.1]:9634.")),
    ("bus error", end(signal=SIGBUS), of_node(shm=(8 * GIB, 7 * GIB))),
    ("crash of torch's own checks",
        end(signal=SIGSEGV,
        tail="Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f1470fc6b80 (most recent call first):\n"
        '  File "/env/lib/python3.11/site-packages/torch/nn/parallel/distributed.py", line 1473 in _ddp_init_helper\n')),
    ("segmentation fault", end(signal=SIGSEGV, tail="Fatal Python error: Segmentation fault\n")),
    ("illegal instruction", end(signal=SIGILL)),
    ("aborted at its end",
        end(signal=SIGABRT, tail="terminate called without an active exception\nFatal Python error: Aborted\n\n"
        "Thread 0x00007f1470fc6b80 (most recent call first):\n  <no Python frame>\n")),
    ("aborted", end(signal=SIGABRT, tail="double free or corruption (!prev)\n")),
    ("killed from outside", end(signal=SIGKILL)),
    ("no terminal", raised("bdb.BdbQuit", ""), Evidence(workers=2)),
    ("no terminal", raised("EOFError", "EOF when reading a line"), Evidence(workers=2)),
    ("debugger quit", raised("bdb.BdbQuit", ""), Evidence(workers=2, debugging=True)),
    ("debugger quit", raised("bdb.BdbQuit", "")),
    ("killed by --chaos", end(signal=SIGKILL), Evidence(chaos=True)),
    ("stopped from outside", end(signal=SIGHUP)),
    ("stopped from outside", end(signal=SIGINT)),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=[f"{name}-{n}" for n, (name, *_) in enumerate(ROWS)])
def test_a_death_is_told_by_its_text_and_the_facts(row: tuple[Any, ...]) -> None:
    name, worker, *facts = row
    cause = classify(worker, *(facts or [Evidence()]))
    assert cause is not None
    assert cause.name == name
    assert cause.advice
    assert "\n" not in cause.advice
    assert not cause.advice.endswith(".")


def test_every_row_of_the_table_has_a_text_here() -> None:
    assert {row.name for row in CAUSES} == {name for name, *_ in ROWS}


@pytest.mark.parametrize(
    "worker",
    [
        end(3),
        raised("ValueError", "boom"),
        raised("ConnectionResetError", "[Errno 104] Connection reset by peer"),
        end(signal=SIGKILL, stopped_with=SIGKILL),
        end(signal=SIGTERM, stopped_with=SIGTERM),
    ],
    ids=["status", "own", "download", "killed by us", "stopped by us"],
)
def test_what_the_table_does_not_know_has_no_cause(worker: WorkerExit) -> None:
    assert classify(worker, Evidence()) is None


def test_an_exception_is_not_explained_by_an_abort_on_the_way_out() -> None:
    error = WorkerError(type="ValueError", message="boom", traceback="ValueError: boom\n")
    worker = end(signal=SIGABRT, error=error, tail="terminate called without an active exception\n")
    assert classify(worker, Evidence()) is None


def test_a_stop_that_sigkill_has_followed_at_once_did_not_come_from_outside() -> None:
    boom = WorkerError(type="ValueError", message="boom", traceback="")
    assert classify(end(signal=SIGTERM, error=boom, stopped_with=SIGKILL), Evidence()) is None
    found = classify(end(signal=SIGTERM, stopped_with=SIGUSR1), Evidence())
    assert found is not None
    assert "SIGTERM came from outside" in found.advice


def test_an_exception_is_not_explained_by_a_preemption() -> None:
    for why in (PREEMPTED, OUT_OF_WALLTIME):
        assert classify(raised("ValueError", "boom"), Evidence(ended_by=why)) is None


@pytest.mark.parametrize(
    ("worker", "facts", "words"),
    [
        (end(signal=SIGKILL), of_node(oom_kills=2), "its peak was 61 GiB; its cgroup counts 2 kills"),
        (end(signal=SIGKILL), of_node(oom_kills=1, oom_kills_of_machine=True), "on this machine meanwhile (1 kill;"),
        (end(signal=SIGKILL), Evidence(), "SIGKILL came from outside"),
        (end(signal=SIGBUS), of_node(shm=(8 * GIB, 4096)), "4 KiB of 8 GiB free"),
        (raised("torch.OutOfMemoryError", "CUDA out of memory."), Evidence(), "cuda:3 is full"),
        (raised("ModuleNotFoundError", "No module named 'torchvision'"), Evidence(interpreter="/opt/venv/bin/python"),
            "/opt/venv/bin/python has no module `torchvision`"),
        (replace(raised("torch.OutOfMemoryError", "CUDA out of memory."), device="cpu"), Evidence(),
            "a GPU, which ddplaunch gave no worker, is full"),
        (_argparse("the following arguments are required: data, --local_rank"), Evidence(),
            "--local_rank '${local_rank}'"),
    ],
    ids=["memory", "memory of the machine", "signal", "shm", "device", "module", "a device of nobody", "local rank"],
)  # fmt: skip
def test_the_advice_names_what_it_is_about(worker: WorkerExit, facts: Evidence, words: str) -> None:
    cause = classify(worker, facts)
    assert cause is not None
    assert words in cause.advice


def test_a_cause_names_the_line_that_told_it_and_none_where_facts_did() -> None:
    killed = raised(
        "RuntimeError",
        "DataLoader worker (pid(s) 7100) exited unexpectedly",
        "first\nRuntimeError: DataLoader worker (pid 7100) is killed by signal: Killed. \nlast",
    )
    told = [classify(killed, of_node(oom_kills=1)), classify(end(signal=SIGKILL), of_node(oom_kills=1))]
    assert [cause and cause.line for cause in told] == [
        "RuntimeError: DataLoader worker (pid 7100) is killed by signal: Killed. ",
        "",
    ]


def test_where_a_worker_said_nothing_no_pattern_is_looked_for(monkeypatch):
    """To compile them takes longer than all else at the end of such a job."""
    monkeypatch.setattr(re, "search", None)
    assert classify(end(code=3), Evidence()) is None
    assert not follows_another(end(code=3))
