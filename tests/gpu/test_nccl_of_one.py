"""What is known of NCCL's collectives in a job of one rank: stacks, RAS, hangs and profiles."""

import gzip
import json
import pickle
import re
import socket

import pytest

from tests.gpu.machine import ONE, PATIENCE, PROGRAMS, sign, skip_without

pytestmark = pytest.mark.gpu
TRAINS, WAITS = PROGRAMS / "trains.py", PROGRAMS / "waits.py"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def waiting(gpu, job):
    """A worker that waits on the GPU, behind an all_reduce."""
    gpu.start(job, *ONE, WAITS, NCCL_RAS_ADDR=f"localhost:{free_port()}")
    sign(job, "waits")
    return job


@pytest.mark.claim(
    "stacks reads torch's flight recorder of NCCL, and names the collective in which a rank waits",
    page="guides/hangs.md",
)
def test_stacks_names_the_collective_that_waits(gpu, waiting, told):
    text = gpu.look(waiting, "stacks").expect(0).out
    told(" / ".join(line.strip() for line in text.splitlines() if "all_reduce" in line)[:200])
    assert "waits.py" in text, text
    found = json.loads(gpu.look(waiting, "stacks", "--json").expect(0).out)
    calls = [call for call in everything(found) if call.get("operation") == "all_reduce"]
    assert calls, json.dumps(found)[:3000]
    assert not calls[-1]["done"], calls


def everything(value):
    """All mappings in what was read as JSON."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from everything(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from everything(inner)


@pytest.mark.claim("stacks ends with the words of NCCL's RAS service", page="guides/hangs.md")
def test_stacks_ends_with_what_ras_says(gpu, waiting, told):
    version = _nccl(gpu)
    skip_without(version >= (2, 24), f"RAS came with NCCL 2.24, and this is {version}")
    text = gpu.look(waiting, "stacks").expect(0).out
    _, found, ras = text.partition("NCCL's RAS service, asked at rank 0:")
    assert found, text
    [status] = re.findall(r"([A-Z]+) +(\S+)$", ras, re.MULTILINE)
    told(f"1 communicator, {status[0]}, {status[1]}")


def _nccl(gpu):
    import subprocess
    import sys

    code = "import torch; print(*torch.cuda.nccl.version())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    return tuple(map(int, done.stdout.split()))


@pytest.mark.claim(
    "--hang-timeout ends a worker that keeps a CPU busy while it waits for the GPU in a collective",
    page="guides/hangs.md",
)
def test_a_worker_that_waits_for_the_gpu_hangs(gpu, job, told):
    done = gpu.run(job, *ONE, "--hang-timeout", "8s", "--grace-period", "1s", WAITS)
    [error] = re.findall(r"^error: .*", done.err, re.MULTILINE)
    told(f"{error[:200]}; after {done.seconds:.0f} s")
    assert "hang" in error or "moved" in error, done.err
    assert done.seconds < 60


@pytest.mark.claim(
    "profile --memory has kernels, collectives of NCCL, and the allocator's history", page="guides/profile.md"
)
def test_a_profile_has_kernels_and_the_history_of_memory(gpu, job, told):
    gpu.start(job, *ONE, TRAINS, 100_000, 0.005)
    sign(job, "trains-0")
    trace = job.home / "trace.json.gz"
    shown = gpu.look(job, "profile", "--seconds", 2, "--memory", "--out", trace)
    shown.expect(0)
    entries = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    kernels = [entry for entry in entries if entry.get("cat") == "kernel"]
    assert kernels, shown.out
    assert any("nccl" in entry["name"].lower() for entry in entries), {entry["name"] for entry in kernels}
    [memory] = job.home.glob("trace*memory-0.pickle")
    history = pickle.loads(memory.read_bytes())
    assert history["device_traces"], history.keys()
    told(f"{len(kernels)} kernels, {sum(map(len, history['device_traces']))} changes of memory")
    gpu.look(job, "stop")


@pytest.mark.claim(
    "the columns of profile divide a step into compute, communication, waiting, data, other", page="guides/profile.md"
)
def test_the_table_of_a_profile_counts_kernels(gpu, job, told):
    gpu.start(job, *ONE, TRAINS, 100_000)
    sign(job, "trains-0")
    shown = gpu.look(job, "profile", "--steps", 50).expect(0)
    row = next(line for line in shown.out.splitlines() if re.match(r" +0 ", line))
    told(f"per step {row}")
    assert re.search(r"\d+ +[\d.]+ [mµu]?s +[\d.]+ [mµu]?s +\d+%", row), shown.out
    gpu.look(job, "stop")
