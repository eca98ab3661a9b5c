"""Failures of other things whose words are those of a cause: each gets no advice, or its own, never that of the other."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ddplaunch.launcher.tell.causes import Evidence, classify
from ddplaunch.spec.outcome import WorkerError, WorkerExit
from tests.unit.report.test_causes import end, raised

DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"
CAUSED = "\nThe above exception was the direct cause of the following exception:\n\n"
TRACEBACK = 'Traceback (most recent call last):\n  File "/project/train.py", line 7, in <module>\n    main()\n'
IN_RENDEZVOUS = (
    'Traceback (most recent call last):\n  File "/project/train.py", line 7, in <module>\n    dist.init_process_group("gloo")\n'
    '  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 1710, in init_process_group\n'
    "    store, rank, world_size = next(rendezvous_iterator)\n"
    '  File "/venv/lib/python3.11/site-packages/torch/distributed/rendezvous.py", line 278, in _env_rendezvous_handler\n'
    "    store = _create_c10d_store(\n"
)
NO_NAME = "[Errno -3] Temporary failure in name resolution"
NO_INTERNET = (
    f"HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /gpt2/resolve/main/config.json "
    f"(Caused by NameResolutionError(\"Failed to resolve 'huggingface.co' ({NO_NAME})\"))"
)
TAKEN = "[Errno 98] Address already in use"


def by(kind: str, message: str, *before: str) -> WorkerExit:
    """End by an exception; with what stands before it in the traceback."""
    return end(
        error=WorkerError(type=kind, message=message, traceback=f"{''.join(before)}{TRACEBACK}{kind}: {message}\n")
    )


def in_rendezvous(kind: str, message: str) -> WorkerExit:
    return end(error=WorkerError(type=kind, message=message, traceback=f"{IN_RENDEZVOUS}{kind}: {message}\n"))


def handled(kind: str, message: str) -> str:
    return f"{TRACEBACK}{kind}: {message}\n{DURING}"


# the failure, and the cause that may be named, if any
MISFITS: dict[str, tuple[WorkerExit, str | None]] = {
    # the rendezvous, and other connections
    "requests without internet": (
        by("requests.exceptions.ConnectionError", NO_INTERNET, handled("socket.gaierror", NO_NAME)),
        "host of the script unknown"),
    "from_pretrained without internet": (
        by("OSError", "We couldn't connect to 'https://huggingface.co'", TRACEBACK, f"socket.gaierror: {NO_NAME}\n",
        CAUSED), "host of the script unknown"),
    "torch.hub without internet": (
        by("urllib.error.URLError", f"<urlopen error {NO_NAME}>", handled("socket.gaierror", NO_NAME)),
        "host of the script unknown"),
    "a logger without internet, and a store that is not there": (replace(in_rendezvous("torch.distributed.DistNetworkError",
        "The client socket has timed out after 5000ms"), stderr_tail=f"wandb: Network error: {NO_NAME}\n"),
        "no store at MASTER_PORT"),
    "a server of the script's own": (by("OSError", TAKEN), "port of the script in use"),
    "a server of aiohttp": (
        by("OSError", "[Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use"),
        "port of the script in use"),
    "a store of the script's own": (
        by("torch.distributed.DistNetworkError",
        "The server socket has failed to listen on any local network address. port: 1234, useIpv6: false, code: -98, "
        "name: EADDRINUSE, message: address already in use"), "port of the script in use"),
    "a store of the script's own that nobody hosts": (
        by("torch.distributed.DistNetworkError",
        "The client socket has timed out after 5000ms while trying to connect to (10.0.0.1, 1234)."),
        "no store at another port"),
    "gloo and the name of this host": (
        in_rendezvous("RuntimeError",
        "[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] rv != -1. -1 vs -1. Name or service not "
        "known"), "own name unknown to gloo"),
    "a database that times out": (by("pymysql.err.OperationalError", "Socket Timeout"), None),
    "a log line of the start": (end(tail="initializing process group of tokenizers\nsome trouble\n"), None),
    # modules that were only tried
    "a module that is optional": (by("ValueError", "boom", handled("ModuleNotFoundError", "No module named 'apex'")),
        None),
    "a library of a module that is optional": (
        by("ValueError", "boom", handled("ImportError", "apex_C.so: undefined symbol: _ZN3c10")), None),
    "a module that another error is about": (
        by("RuntimeError", "Failed to import transformers.models.gpt2", TRACEBACK,
        "ModuleNotFoundError: No module named 'safetensors'\n", CAUSED), "module not found"),
    "a prompt that was handled": (replace(by("ValueError", "boom", handled("EOFError", "EOF when reading a line"))),
        None),
    "a library that may not be read": (
        by("ImportError", "/opt/x/libx.so.1: cannot open shared object file: Permission denied"), None),
    "a library for which there is no memory": (
        by("ImportError", "/venv/lib/libtorch_cuda.so: failed to map segment from shared object"), None),
    # words in the code of a traceback
    "code that would handle a full disk": (
        end(error=WorkerError(type="ValueError", message="boom",
        traceback='Traceback (most recent call last):\n  File "/project/train.py", line 7, in <module>\n'
        '    save(path)  # else "No space left on device", "CUDA out of memory" or "Address already in use"\n'
        "    ^^^^^^^^^^\nValueError: boom\n")), None),
    # memory and devices of another kind
    "a GPU's memory, by another library": (
        by("cupy.cuda.memory.OutOfMemoryError", "Out of memory allocating 1,024 bytes"), None),
    "memory that InfiniBand locks": (
        by("RuntimeError", "Call to ibv_create_cq failed with error Cannot allocate memory"), "locked memory"),
    "a device that is no GPU": (by("ValueError", "Invalid device id: microphone 3"), None),
}  # fmt: skip


@pytest.mark.parametrize(("worker", "name"), MISFITS.values(), ids=MISFITS)
def test_what_only_looks_like_a_cause_gets_no_advice_or_its_own(worker: WorkerExit, name: str | None) -> None:
    for port_given in (False, True):
        cause = classify(worker, Evidence(workers=2, master_port=51771, port_given=port_given))
        assert (cause and cause.name) == name


@pytest.mark.parametrize("worker", [worker for worker, _ in MISFITS.values()], ids=MISFITS)
def test_no_option_for_the_rendezvous_is_advised_where_something_else_failed(worker: WorkerExit) -> None:
    cause = classify(worker, Evidence(workers=2, master_port=51771))
    assert cause is None or "--master-" not in cause.advice


FAILED_TO_LISTEN = in_rendezvous(
    "torch.distributed.DistNetworkError",
    "The server socket has failed to listen on any local network address. port: 51771, useIpv6: false, code: -98, name: "
    "EADDRINUSE, message: address already in use",
)


def test_to_leave_the_port_out_is_advised_only_to_those_who_gave_it() -> None:
    given, free = (classify(FAILED_TO_LISTEN, Evidence(master_port=51771, port_given=given)) for given in (True, False))
    assert given is not None
    assert free is not None
    assert "leave `--master-port` out" in given.advice
    assert (free.name, "--master-port" in free.advice) == ("address in use", False)


@pytest.mark.parametrize(
    "worker",
    [
        in_rendezvous("socket.gaierror", "[Errno -2] Name or service not known"),
        end(tail=f"{IN_RENDEZVOUS}socket.gaierror: [Errno -2] Name or service not known\n"),
        raised("torch.distributed.DistNetworkError", "Failed to resolve gpu1: Name or service not known"),
    ],
    ids=["by its frames", "by the end of stderr", "by its exception"],
)
def test_an_unknown_master_addr_is_told_by_the_frames_of_the_rendezvous_or_its_exception(worker: WorkerExit) -> None:
    cause = classify(worker, Evidence())
    assert cause is not None
    assert (cause.name, "--master-addr" in cause.advice) == ("unknown host", True)
