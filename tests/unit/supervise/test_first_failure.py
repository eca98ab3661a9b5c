"""The root cause is the worker that failed on its own, whatever its peers said and however early they said it.

The texts are torch's and NCCL's own: gloo's and the store's were recorded with torch 2.13 by letting one of two ranks
die, the others are from reports to PyTorch and NCCL.
"""

from signal import SIGABRT, SIGKILL, SIGSEGV, SIGTERM

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.launcher.decide.first_failure import failure_status, first_failure, follows_another
from ddplaunch.spec.outcome import WorkerError, WorkerExit
from tests.unit.builders import worker_exit

GLOO_CLOSED = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9634."
    " This is typically caused by a remote worker crashing. Check the logs of the remote worker before reporting an"
    " error. GLHF! 🏖️"
)
GLOO_RESET = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:17810: Connection"
    " reset by peer. This is typically caused by a remote worker hanging or bugs in the application. Check the logs of"
    " the remote worker before reporting an error. GLHF! 🏖️"
)
NCCL_REMOTE = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or there was a"
    " network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote"
    " process exiting prematurely.\nLast error:\nsocketProgressOpt: Call to recv from 172.16.0.4<33759> failed :"
    " Connection reset by peer"
)
NCCL_WATCHDOG = (
    "[rank1]:[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout:"
    " WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, NumelOut=9801523, Timeout(ms)=600000) ran for 600020"
    " milliseconds before timing out.\nterminate called after throwing an instance of 'c10::DistBackendError'\n"
)
NCCL_ILLEGAL_ACCESS = (
    "[rank1]:[E626 06:24:44.90 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog"
    " thread terminated with exception: CUDA error: an illegal memory access was encountered\n"
)

FOLLOWING = [
    ("RuntimeError", GLOO_CLOSED),
    ("RuntimeError", GLOO_RESET),
    ("RuntimeError",
        "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for"
        " recv operation to complete"),
    ("RuntimeError",
        "[/opt/conda/conda-bld/pytorch_1682343967769/work/third_party/gloo/gloo/transport/tcp/pair.cc:799] connect"
        " [172.31.71.170]:13195: Connection refused"),
    ("RuntimeError",
        "Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:152] timed out"
        " connecting: SO_ERROR: Connection refused, remote=[10.1.2.3]:20901"),
    ("RuntimeError", "Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error"),
    ("RuntimeError",
        "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms\n Original exception: \n[/__w/pytorch/pytorch/"
        "third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to"
        " complete"),
    ("torch.distributed.DistNetworkError", "Connection reset by peer"),
    ("torch.distributed.DistNetworkError", "Broken pipe"),
    ("torch.distributed.DistNetworkError",
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"),
    ("torch.distributed.DistNetworkError",
        "The client socket has timed out after 5000ms while trying to connect to (127.0.0.1, 51771)."),
    ("torch.distributed.DistStoreError", "Timed out after 6 seconds waiting for clients. 1/2 clients joined."),
    ("torch.distributed.DistStoreError", "wait timeout after 5000ms, keys: /default_pg/0//cpu//0/2"),
    ("RuntimeError", "Connection reset by peer\nException raised from recvBytes at /pytorch/c10d/Utils.hpp:672"),
    ("torch.distributed.DistBackendError", NCCL_REMOTE),
    ("torch.distributed.DistBackendError",
        "[8] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0',"
        " but store->get('0') got error: Connection reset by peer"),
    ("torch.distributed.DistBackendError",
        "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1275, internal error, NCCL version 2.14.3\n"
        "ncclInternalError: Internal check failed.\nLast error:\nNet : Connection closed by remote peer user<50260>"),
    ("RuntimeError",
        "NCCL communicator was aborted on rank 2.  Original reason for failure was: [Rank 2] Watchdog caught collective"
        " operation timeout: WorkNCCL(SeqNum=10, OpType=BROADCAST, Timeout(ms)=1800000) ran for 1805457 milliseconds"
        " before timing out."),
]  # fmt: skip

OWN = [
    ("ValueError", "boom"),
    ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
    ("BrokenPipeError", "[Errno 32] Broken pipe"),
    ("requests.exceptions.ConnectionError",
        "('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))"),
    ("torch.distributed.DistNetworkError",
        "The server socket has failed to listen on any local network address. port: 59851, useIpv6: false, code: -98,"
        " name: EADDRINUSE, message: address already in use"),
    ("torch.distributed.DistStoreError",
        "use_libuv was requested but PyTorch was built without libuv support, run with USE_LIBUV=0 to disable it."),
    ("torch.distributed.DistBackendError",
        "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, invalid usage (run with NCCL_DEBUG=WARN for"
        " details), NCCL version 2.20.5\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast"
        " error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 10"),
    ("RuntimeError",
        "[enforce fail at /__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != nullptr."
        " Unable to find address for: eth9"),
    ("RuntimeError", "Detected mismatch between collectives on ranks. Rank 0 is running collective: ALLREDUCE"),
]  # fmt: skip


def _short(text: str) -> str:
    return text.partition("\n")[0][:60]


def error(kind: str, message: str, at: float | None = None, traceback: str = "") -> WorkerError:
    return WorkerError(type=kind, message=message, traceback=traceback or f"{kind}: {message}\n", at=at)


def end(
    rank: int,
    code: int | None = 1,
    signal: int | None = None,
    at: float = 10.0,
    *,
    stopped: tuple[int, float] | None = None,
    error: WorkerError | None = None,
    tail: str = "",
) -> WorkerExit:
    with_, when = stopped or (None, None)
    how = {"stopped_with": with_, "stopped_at": when, "error": error, "stderr_tail": tail}
    return worker_exit(rank, code, signal, at=at, **how)


@pytest.mark.parametrize(("kind", "message"), FOLLOWING, ids=_short)
def test_an_error_about_a_peer_that_is_gone_follows(kind: str, message: str) -> None:
    assert follows_another(error(kind, message))
    assert follows_another(end(0, error=error(kind, message)))
    assert follows_another(end(0, tail=f"Traceback (most recent call last):\n[rank0]: {kind}: {message}\n"))


@pytest.mark.parametrize(("kind", "message"), OWN, ids=_short)
def test_any_other_error_does_not_follow(kind: str, message: str) -> None:
    assert not follows_another(error(kind, message))
    assert not follows_another(end(0, error=error(kind, message)))


def test_an_abort_by_the_watchdog_of_nccl_follows_a_peer_that_hangs() -> None:
    assert follows_another(end(1, signal=SIGABRT, tail=NCCL_WATCHDOG))
    assert not follows_another(end(1, signal=SIGABRT, tail=NCCL_ILLEGAL_ACCESS))


def test_a_signal_that_no_exception_leads_to_does_not_follow_whatever_was_said_before() -> None:
    assert not follows_another(end(1, signal=SIGKILL, tail=GLOO_CLOSED))
    assert not follows_another(end(1, signal=SIGSEGV, tail=NCCL_WATCHDOG))


def test_an_error_that_wraps_the_loss_of_a_peer_follows() -> None:
    chain = (
        f"Traceback (most recent call last):\nRuntimeError: {GLOO_CLOSED}\n\nThe above exception was the direct cause"
        " of the following exception:\n\nTraceback (most recent call last):\nTrainingFailed: epoch 3\n"
    )
    assert follows_another(error("TrainingFailed", "epoch 3", traceback=chain))


def test_sys_exit_after_the_loss_of_a_peer_was_printed_follows() -> None:
    assert follows_another(end(0, error=error("SystemExit", "1"), tail=f"ERROR:root:{GLOO_CLOSED}\n"))


def test_a_job_whose_workers_all_ended_with_0_has_no_failure() -> None:
    assert first_failure([end(0, 0), end(1, 0)]) is None
    assert first_failure([]) is None


OURS = (SIGTERM, 10.1)
FIRST: dict[str, tuple[list[WorkerExit], int | None]] = {  # the ends, and the rank that failed first
    "those that we stopped did not fail": ([end(0, signal=SIGTERM, stopped=OURS), end(1, 143, stopped=OURS)], None),
    "nor did one that we had to kill": ([end(0, signal=SIGKILL, at=20.0, stopped=(SIGKILL, 20.0))], None),
    "of two that die 1 ms apart the earlier": ([end(0, 3, at=10.001), end(1, 4, at=10.000)], 1),
    "of two that die 1 ms apart the earlier, told first": ([end(1, 4, at=10.000), end(0, 3, at=10.001)], 1),
    "the one that raised earlier, although it ended later": (
        [end(0, at=10.0, error=error("ValueError", "b", 9.8)), end(1, at=12.0, error=error("ValueError", "a", 9.7))],
        1),
    "not an error that was raised because of our stop": (
        [end(0, 3), end(1, 1, at=11.0, stopped=OURS, error=error("KeyboardInterrupt", "", 10.2))], 0),
    "not an error of unknown time in a worker that we stopped": (
        [end(0, 3), end(1, 1, at=11.0, stopped=OURS, error=error("ValueError", "boom"))], 0),
    "a failure of its own before one that dies of something else while we stop it": (
        [end(0, 3, at=10.0), end(1, signal=SIGSEGV, at=10.2, stopped=OURS)], 0),
    "where all only follow the earliest: one rank left early with 0, or hangs": (
        [end(0, at=10.2, error=error("RuntimeError", GLOO_CLOSED, 10.1)),
        end(1, at=10.3, error=error("RuntimeError", GLOO_RESET, 10.0)), end(2, 0, at=9.0)], 1),
}  # fmt: skip


@pytest.mark.parametrize(("exits", "rank"), FIRST.values(), ids=FIRST)
def test_the_first_failure_is(exits: list[WorkerExit], rank: int | None) -> None:
    first = first_failure(exits)
    assert (first and first.rank) == rank


@pytest.mark.parametrize(("kind", "message"), FOLLOWING, ids=_short)
def test_a_victim_is_not_first_although_it_ended_before_the_culprit(kind: str, message: str) -> None:
    victim = end(0, at=10.0, error=error(kind, message, 9.9))
    culprit = end(1, 3, at=10.5)
    assert first_failure([victim, culprit]) is culprit


def test_a_culprit_that_raised_and_was_then_stopped_by_us_is_first() -> None:
    victim = end(0, at=10.0, error=error("RuntimeError", GLOO_CLOSED, 9.9))
    culprit = end(1, signal=SIGTERM, at=10.3, stopped=(SIGTERM, 10.1), error=error("ValueError", "boom", 9.5))
    assert first_failure([victim, culprit]) is culprit
    assert failure_status(culprit) == 1


def test_a_worker_that_dies_of_something_else_while_we_stop_it_comes_before_those_that_follow() -> None:
    """A process with a GPU closes its connections long before it is known to be dead."""
    victim = end(0, at=10.0, error=error("RuntimeError", GLOO_RESET, 9.9))
    killed = end(1, signal=SIGKILL, at=11.0, stopped=(SIGTERM, 10.5))
    assert first_failure([victim, killed]) is killed
    assert failure_status(killed) == 137


def test_an_error_that_was_read_apart_from_the_exit_counts_and_is_in_the_answer() -> None:
    late = error("ValueError", "boom", 9.0)
    first = first_failure([end(0, 3, at=9.5), end(1, 1, at=10.0)], {1: late})
    assert first is not None
    assert (first.rank, first.error) == (1, late)


def test_a_worker_that_raised_but_has_not_ended_yet_cannot_be_named() -> None:
    victim = end(0, error=error("RuntimeError", GLOO_CLOSED, 9.9))
    assert first_failure([victim], {1: error("ValueError", "boom", 9.5)}) is victim


def test_the_status_of_a_failure_is_never_0() -> None:
    assert failure_status(end(0, 3)) == 3
    assert failure_status(end(0, signal=SIGSEGV)) == 139
    assert failure_status(end(0, 0, stopped=(SIGTERM, 10.1), error=error("ValueError", "boom", 9.5))) == 1


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1, 3]), st.floats(0, 100), st.sampled_from([None, GLOO_CLOSED, "boom"])),
        max_size=8,
    ),
    st.randoms(use_true_random=False),
)
def test_the_order_in_which_ends_were_noticed_does_not_matter(facts, random):
    exits = [
        end(rank, code, at=at, error=error("RuntimeError", text) if text and code else None)
        for rank, (code, at, text) in enumerate(facts)
    ]
    expected = first_failure(exits)
    random.shuffle(exits)
    assert first_failure(exits) is expected
    assert (expected is None) == all(code == 0 for code, _, _ in facts)
