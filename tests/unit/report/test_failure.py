"""The failure report as people see it, for one situation each."""

from signal import SIGABRT, SIGKILL, SIGSEGV, SIGTERM
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ddplaunch.launcher.decide.first_failure import first_failure
from ddplaunch.launcher.tell.causes import Cause, Evidence, classify
from ddplaunch.launcher.tell.failure import FailureReport, render
from ddplaunch.spec.outcome import OUT_OF_WALLTIME, Frame, Progress, WorkerError, WorkerExit
from ddplaunch.system.console.paint import Paint, Words, plain
from ddplaunch.system.errors import visible
from tests.unit.builders import frame, of_node, worker_exit

CWD = "/home/ada/digits"
PEER_LOST = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9634."
)


MAIN = frame(f"{CWD}/train.py", 120, "<module>", "main()")
STEP = frame(f"{CWD}/train.py", 88, "train_step", "loss = model(batch)")
FORWARD = frame(
    "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py",
    125,
    "forward",
    "return F.linear(input, self.weight, self.bias)",
)


def error(kind: str, message: str, *frames: Frame, at: float | None = None, traceback: str = "") -> WorkerError:
    return WorkerError(type=kind, message=message, traceback=traceback, frames=frames, at=at)


def end(
    rank: int,
    code: int = 1,
    signal: int | None = None,
    *,
    at: float = 1000.0,
    error: WorkerError | None = None,
    tail: str = "",
    host: str = "gpu01",
) -> WorkerExit:
    card = {"local_rank": rank % 4, "host": host, "pid": 4700 + rank, "device": f"cuda:{rank % 4}", "seconds": 4.0}
    said = {"error": error, "stderr_tail": tail, "log": f"{CWD}/logs/rank-{rank}.err"}
    return worker_exit(rank, code, signal, at=at, **card, **said)


def stopped(rank: int, *, with_: int = SIGTERM, took: float = 0.1, host: str = "gpu01") -> WorkerExit:
    return replace(end(rank, signal=with_, at=1000.0 + took, host=host), stopped_with=with_, stopped_at=1000.0)


def report(*exits: WorkerExit, facts: Evidence | None = None, restarts: int = 0) -> str:
    first = first_failure(exits)
    assert first is not None
    cause = classify(first, facts or Evidence())
    return render(FailureReport(first=first, exits=exits, cause=cause, cwd=CWD, restarts=restarts, max_restarts=3))


def expect(text: str) -> str:
    return dedent(text).lstrip("\n")


def test_an_exception_on_one_of_three_nodes() -> None:
    oom = error("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", MAIN, STEP, FORWARD)
    others = [stopped(rank, host=f"gpu0{rank // 4 + 1}") for rank in range(12) if rank not in (3, 7)]
    hard = stopped(7, with_=SIGKILL, took=10.0, host="gpu02")
    culprit = replace(end(3, error=oom), seconds=724.0)
    assert report(culprit, hard, *others) == expect("""
    error: rank 3 on gpu01 failed: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB   (exit status 1, after 12 min 4 s)

      train.py:88 in train_step
        loss = model(batch)
      torch/nn/modules/linear.py:125 in forward
        return F.linear(input, self.weight, self.bias)

      rank 3   gpu01  local rank 3  pid 4703  cuda:3
      logs logs/rank-3.err
      the other 11 workers were stopped: 10 by SIGTERM in 0.1 s, rank 7 by SIGKILL after 10 s

    hint: cuda:3 is full: a smaller batch per worker, or end other programs that use it (`nvidia-smi` lists them)
    """)  # noqa: E501  # the head is as wide as what it says


def test_an_exception_on_one_node() -> None:
    assert report(end(3, error=error("ValueError", "boom", MAIN, STEP)), *map(stopped, range(3))) == expect("""
    error: rank 3 failed: ValueError: boom   (exit status 1, after 4 s)

      train.py:88 in train_step
        loss = model(batch)

      rank 3   pid 4703  cuda:3
      logs logs/rank-3.err
      the other 3 workers were stopped by SIGTERM in 0.1 s
    """)


def test_what_an_exception_was_raised_from_is_named_with_its_place_and_what_was_handled_before_is_not() -> None:
    def trace(line: int, function: str, last: str) -> str:
        return f'Traceback (most recent call last):\n  File "{CWD}/data.py", line {line}, in {function}\n    go()\n{last}\n'

    caused = "\nThe above exception was the direct cause of the following exception:\n\n"
    handled = "\nDuring handling of the above exception, another exception occurred:\n\n"
    first, second = trace(9, "look", "OSError: gone"), trace(12, "load", "KeyError: 'loss'\nnote")
    whole = (
        f"{first}{handled}{second}{caused}{trace(30, 'read', 'ValueError: bad')}{caused}{trace(88, 'step', 'E: boom')}"
    )
    failed = end(0, error=error("E", "boom", STEP, traceback=whole))
    assert report(failed).splitlines()[2:6] == [
        "  train.py:88 in train_step",
        "    loss = model(batch)",
        "  raised from ValueError: bad   (data.py:30 in read)",
        "  raised from KeyError: 'loss'   (data.py:12 in load)",
    ]


def test_the_only_worker() -> None:
    assert report(end(0, error=error("KeyError", "'loss'", MAIN))) == expect("""
    error: rank 0 failed: KeyError: 'loss'   (exit status 1, after 4 s)

      train.py:120
        main()

      rank 0   pid 4700  cuda:0
      logs logs/rank-0.err
    """)


def test_a_message_of_many_lines() -> None:
    message = "Error(s) in loading state_dict for Net:\n" + "\n".join(f"\tMissing key: fc{n}.weight" for n in range(30))
    head, *_ = report(end(0, error=error("RuntimeError", message, MAIN)), stopped(1)).split("\n\n")
    assert head.splitlines() == [
        "error: rank 0 failed: RuntimeError: Error(s) in loading state_dict for Net:   (exit status 1, after 4 s)",
        *(f"  \tMissing key: fc{n}.weight" for n in range(20)),
        "  ... and 10 more lines in its log",
    ]


def test_the_cpp_stack_in_a_message_is_left_out() -> None:
    message = (
        "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
        "\n\nException raised from c10_cuda_check at /pytorch/c10/cuda/CUDAException.cpp:43 (most recent call first):\n"
        "frame #0: c10::Error::Error(c10::SourceLocation) + 0x96 (0x7f5a96 in libc10.so)\nframe #1: <unknown> (0x1)\n"
    )
    assert report(end(1, error=error("torch.AcceleratorError", message, STEP)), stopped(0)) == expect("""
    error: rank 1 failed: torch.AcceleratorError: CUDA error: device-side assert triggered   (exit status 1, after 4 s)
      Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.

      train.py:88 in train_step
        loss = model(batch)

      rank 1   pid 4701  cuda:1
      logs logs/rank-1.err
      the other worker was stopped by SIGTERM in 0.1 s

    hint: the line shown may be a later one: `--env CUDA_LAUNCH_BLOCKING=1` makes the traceback exact
    """)


def test_an_exit_status() -> None:
    tail = "".join(f"line {n}\n" for n in range(40)) + "no such data set\n\n"
    head, said, _ = report(end(1, 3, tail=tail), stopped(0)).split("\n\n")
    assert head == "error: rank 1 failed: exit status 3   (after 4 s)"
    lines = [*(f"line {n}" for n in range(29, 40)), "no such data set"]
    assert said.splitlines() == ["  last stderr output:", *(f"    {line}" for line in lines)]


def test_why_the_cluster_ends_the_job_stands_first() -> None:
    first = end(2, signal=SIGTERM)
    cause = classify(first, Evidence(ended_by=OUT_OF_WALLTIME))
    text = render(FailureReport(first=first, exits=(first,), cause=cause, ended_by="out of walltime"))
    assert text.startswith("error: out of walltime: rank 2 failed: killed by SIGTERM   (after ")
    assert "hint: the time limit of the allocation was reached" in text


def test_an_exit_status_without_a_word() -> None:
    assert report(end(1, 3), stopped(0)) == expect("""
    error: rank 1 failed: exit status 3   (after 4 s)

      rank 1   pid 4701  cuda:1
      logs logs/rank-1.err
      the other worker was stopped by SIGTERM in 0.1 s
    """)


def test_sys_exit_with_a_sentence() -> None:
    leave = error("SystemExit", "no data in /data/train", frame(f"{CWD}/train.py", 12, "main", "sys.exit(text)"))
    assert report(end(0, error=leave, tail="no data in /data/train\n"), stopped(1)) == expect("""
    error: rank 0 failed: no data in /data/train   (exit status 1, after 4 s)

      train.py:12 in main
        sys.exit(text)

      rank 0   pid 4700  cuda:0
      logs logs/rank-0.err
      the other worker was stopped by SIGTERM in 0.1 s
    """)


def test_sys_exit_with_a_number_by_argparse() -> None:
    library = frame("/usr/lib/python3.11/argparse.py", 2640, "error", "self.exit(2, ...)")
    leave = error("SystemExit", "2", frame(f"{CWD}/train.py", 9, "main", "args = parser.parse_args()"), library)
    tail = "usage: train.py [-h] [--lr LR]\ntrain.py: error: unrecognized arguments: --local-rank=0\n"
    alike = [end(rank, 2, error=leave, tail=tail) for rank in range(4)]
    assert report(*alike) == expect("""
    error: rank 0 failed: exit status 2   (after 4 s)

      train.py:9 in main
        args = parser.parse_args()

      last stderr output:
        usage: train.py [-h] [--lr LR]
        train.py: error: unrecognized arguments: --local-rank=0

      rank 0   pid 4700  cuda:0
      logs logs/rank-0.err
      all 4 ranks failed with the same error

    hint: the script takes no local rank as an argument: leave it out, LOCAL_RANK is in the environment
    """)


def test_a_segmentation_fault_with_the_stack_of_faulthandler() -> None:
    tail = (
        "step 12\nFatal Python error: Segmentation fault\n\n"
        "Thread 0x00007f0cf0000640 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 324 in wait\n\n'
        "Current thread 0x00007f0cf6dedb80 (most recent call first):\n"
        '  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at\n'
        f'  File "{CWD}/train.py", line 15 in inner\n'
        f'  File "{CWD}/train.py", line 17 in <module>\n\n'
        "Extension modules: numpy._core._multiarray_umath (total: 1)\n"
    )
    crash = replace(end(2, signal=SIGSEGV, tail=tail), core_dumped=True, peak_rss=3 * 1024**3)
    assert report(crash, stopped(0), stopped(1)) == expect("""
    error: rank 2 failed: killed by SIGSEGV   (core dumped, after 4 s)

      stack, innermost frame first:
        ctypes/__init__.py:519 in string_at
        train.py:15 in inner
        train.py:17

      rank 2   pid 4702  cuda:2  peak memory 3 GiB
      logs logs/rank-2.err
      the other 2 workers were stopped by SIGTERM in 0.1 s

    hint: a crash in compiled code: look for a package built for another torch, CUDA or NumPy at the top of the stack
    """)


@pytest.mark.parametrize(("total", "shown"), [(None, "step 1,412"), (2000, "step 1,412 of 2,000")])
def test_the_step_is_named_that_the_failed_worker_has_said_last(total: int | None, shown: str) -> None:
    failed = replace(end(2, code=3), progress=Progress(step=1412, total=total))
    assert f"  rank 2   pid 4702  cuda:2  {shown}\n" in report(failed)


def test_a_kill_by_the_kernel_for_memory() -> None:
    killed = replace(end(2, signal=SIGKILL, tail="epoch 1:  10%\repoch 1:  90%\n"), peak_rss=61 * 1024**3 + 2**28)
    assert report(killed, stopped(0), stopped(1), facts=of_node(oom_kills=1)) == expect("""
    error: rank 2 failed: killed by SIGKILL   (after 4 s)

      last stderr output:
        epoch 1:  90%

      rank 2   pid 4702  cuda:2  peak memory 61.2 GiB
      logs logs/rank-2.err
      the other 2 workers were stopped by SIGTERM in 0.1 s

    hint: the kernel's OOM killer ended it (its peak was 61.2 GiB; its cgroup counts 1 kill): ask for more, or use fewer DataLoader workers
    """)  # noqa: E501  # a hint is one line


def test_the_line_that_told_the_cause_is_quoted_where_it_is_not_shown() -> None:
    killed = "RuntimeError: DataLoader worker (pid 7100) is killed by signal: Killed. "
    gone = error(
        "RuntimeError", "DataLoader worker (pid(s) 7100) exited unexpectedly", MAIN, traceback=f"{killed}\n...\n"
    )
    assert report(end(0, error=gone), facts=of_node(oom_kills=1)) == expect("""
    error: rank 0 failed: RuntimeError: DataLoader worker (pid(s) 7100) exited unexpectedly   (exit status 1, after 4 s)

      train.py:120
        main()

      rank 0   pid 4700  cuda:0
      logs logs/rank-0.err

      evidence: RuntimeError: DataLoader worker (pid 7100) is killed by signal: Killed.

    hint: the kernel's OOM killer ended a child process (1 kill meanwhile): ask for more memory, or use fewer of them (num_workers of a DataLoader)
    """)  # noqa: E501  # a hint is one line


def test_an_abort_in_compiled_code() -> None:
    tail = (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        "  what():  Received data size doesn't match expected size.\n"
        "frame #0: gloo::transport::tcp::Pair::read() + 0x10 (0x7f in libtorch_cpu.so)\n"
        "Fatal Python error: Aborted\n\nCurrent thread 0x00007f0cf6dedb80 (most recent call first):\n"
        f'  File "{CWD}/train.py", line 88 in train_step\n'
    )
    facts = Evidence(workers=2, program="train.py")
    assert report(end(1, signal=SIGABRT, tail=tail), stopped(0), facts=facts) == expect("""
    error: rank 1 failed: killed by SIGABRT   (after 4 s)

      last stderr output:
        terminate called after throwing an instance of 'gloo::EnforceNotMet'
          what():  Received data size doesn't match expected size.

      stack, innermost frame first:
        train.py:88 in train_step

      rank 1   pid 4701  cuda:1
      logs logs/rank-1.err
      the other worker was stopped by SIGTERM in 0.1 s

    hint: the ranks call different collectives: `ddplaunch check --world-size 2 train.py` runs each alone, and names the lines
    """)


def test_an_abort_in_a_thread_without_python_frames() -> None:
    tail = (
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        "Fatal Python error: Aborted\n\nCurrent thread 0x00007f0cf6dedb80 (most recent call first):\n"
        "  <no Python frame>\n\nThread 0x00007f0cf6dedb81 (most recent call first):\n"
        f'  File "{CWD}/train.py", line 88 in train_step\n'
    )
    assert report(end(1, signal=SIGABRT, tail=tail), stopped(0)) == expect("""
    error: rank 1 failed: killed by SIGABRT   (after 4 s)

      last stderr output:
        terminate called after throwing an instance of 'c10::DistBackendError'

      stack of the main thread, innermost frame first:
        train.py:88 in train_step

      rank 1   pid 4701  cuda:1
      logs logs/rank-1.err
      the other worker was stopped by SIGTERM in 0.1 s

    hint: compiled code called abort(); the reason is in the last stderr output
    """)


# torch 2.6 (github.com/huggingface/open-r1/issues/620), and the dump as CPython writes it of a thread that it does not know
WATCHDOG = """\
[rank3]:[E329 03:35:46 ProcessGroupNCCL.cpp:629] [Rank 3] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=4, OpType=ALLREDUCE, NumelIn=112, NumelOut=112, Timeout(ms)=1800000) ran for 1800011 milliseconds \
before timing out.
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with exception: [Rank 3] \
Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE, NumelIn=112, NumelOut=112, \
Timeout(ms)=1800000) ran for 1800011 milliseconds before timing out.
Exception raised from checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:632 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f5a9616c1b6 in /opt/torch/lib/libc10.so)
frame #1: c10d::ProcessGroupNCCL::ncclCommWatchdog() + 0x14d (0x7f5a4441eced in /opt/torch/lib/libtorch_cuda.so)

Fatal Python error: Aborted

Thread 0x00007fa0f51fd640 (most recent call first):
  File "/opt/lib/python3.11/threading.py", line 324 in wait
  File "/opt/lib/python3.11/site-packages/tqdm/_monitor.py", line 60 in run

Thread 0x00007fa1f51fd640 (most recent call first):
  File "/opt/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2501 in all_reduce
  File "CWD/train.py", line 88 in train_step
  File "CWD/train.py", line 120 in <module>
  File "/opt/lib/python3.11/site-packages/ddplaunch/worker/bootstrap.py", line 34 in <module>

Extension modules: numpy.core._multiarray_umath, torch._C, torch._C._fft (total: 3)
""".replace("CWD", CWD)


def test_an_abort_by_the_watchdog_of_nccl_names_the_collective_and_the_line_of_the_main_thread() -> None:
    shown = report(end(3, signal=SIGABRT, tail=WATCHDOG), stopped(0))
    assert (
        """
  NCCL's watchdog ended it: all_reduce #4 had run for 30 min

  stack of the main thread, innermost frame first:
    torch/distributed/distributed_c10d.py:2501 in all_reduce
    train.py:88 in train_step
    train.py:120

"""
        in shown
    )
    assert "a rank did not call the same collective" in shown
    assert "frame #" not in shown
    assert "Extension modules" not in shown


def test_an_error_that_the_watchdog_of_nccl_has_found_has_the_number_of_its_collective() -> None:
    """As torch 2.5 writes it: github.com/pytorch/pytorch/issues/126544 and ProcessGroupNCCL.cpp."""
    tail = (
        "[rank3]:[E ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank 3] Exception (either an error or timeout) "
        "detected by watchdog at work: 7, last enqueued NCCL work: 9, last completed NCCL work: 6.\n"
        "Fatal Python error: Aborted\n\n"
    )
    assert "it found the failure at collective #7\n" in report(end(3, signal=SIGABRT, tail=tail), stopped(0))


@pytest.mark.parametrize("at", [3, 20])
def test_of_a_deep_stack_the_line_of_the_script_is_shown(at: int) -> None:
    frames = [
        f'  File "/opt/lib/python3.11/site-packages/torch/nn/modules/module.py", line {line} in f\n'
        for line in range(30)
    ]
    frames[at] = f'  File "{CWD}/train.py", line 88 in train_step\n'
    tail = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n" + "".join(frames)
    assert "    train.py:88 in train_step\n" in report(end(3, signal=SIGSEGV, tail=tail), stopped(0))


def test_ranks_that_the_watchdog_of_nccl_has_ended_alike_failed_with_the_same_error() -> None:
    other = WATCHDOG.replace("Rank 3", "Rank 0").replace("1800011", "1800012").replace("umath, ", "")
    assert "both ranks failed with the same error" in report(
        end(3, signal=SIGABRT, tail=WATCHDOG), end(0, signal=SIGABRT, tail=other)
    )


def test_equal_failures_are_shown_once() -> None:
    exits = [
        end(
            rank,
            at=1000 + rank / 10,
            error=error("torch.OutOfMemoryError", f"CUDA out of memory. GPU {rank} has 7{rank}.1 GiB", STEP, FORWARD),
        )
        for rank in (3, 0, 1, 2, 4, 5, 6, 7)
    ]
    exits[0] = replace(exits[0], at=999.0)
    assert report(*exits) == expect("""
    error: rank 3 failed: torch.OutOfMemoryError: CUDA out of memory. GPU 3 has 73.1 GiB   (exit status 1, after 4 s)

      train.py:88 in train_step
        loss = model(batch)
      torch/nn/modules/linear.py:125 in forward
        return F.linear(input, self.weight, self.bias)

      rank 3   pid 4703  cuda:3
      logs logs/rank-3.err
      all 8 ranks failed with the same error

    hint: cuda:3 is full: a smaller batch per worker, or end other programs that use it (`nvidia-smi` lists them)
    """)


def test_ranks_that_were_stopped_while_they_exited_with_the_same_usage_error_failed_with_it() -> None:
    usage = "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --lr\n"
    others = [replace(stopped(rank), stderr_tail=usage) for rank in (1, 2)]
    shown = report(end(0, code=2, tail=usage), *others)
    assert "all 3 ranks failed with the same error\n" in shown
    assert "were stopped" not in shown
    silent = report(end(0, code=2, tail=usage), others[0], stopped(2))
    assert "ranks 0-1 failed with the same error\n  rank 2 was stopped" in silent


def test_the_log_below_the_home_folder_is_shown_as_a_shell_takes_it() -> None:
    away = replace(end(1), log="/home/ann/.local/state/rank-1.err")
    text = render(FailureReport(first=away, exits=(away,), cwd=CWD, home="/home/ann"))
    assert "  logs ~/.local/state/rank-1.err\n" in text
    assert "  logs /home/ann/" in render(FailureReport(first=away, exits=(away,), cwd=CWD, home="/home/an"))


def test_the_folder_of_a_worker_without_a_log_is_not_called_that_of_logs() -> None:
    away = replace(end(0), log=None)
    text = render(FailureReport(first=away, exits=(away,), cwd=CWD, log_folder=f"{CWD}/runs/k7qx"))
    assert "  run  runs/k7qx\n" in text
    assert "  logs " not in text


def test_different_exit_statuses_are_different_failures() -> None:
    assert report(end(0, 3), end(1, 4, at=1000.5), end(2, 3, at=1001.0)) == expect("""
    error: rank 0 failed: exit status 3   (after 4 s)

      rank 0   pid 4700  cuda:0
      logs logs/rank-0.err
      ranks 0,2 failed with the same error
      rank 1 failed 0.5 s later: exit status 4
    """)


def test_later_failures_and_those_that_followed() -> None:
    lost = error("RuntimeError", PEER_LOST, STEP, at=1000.2)
    exits = [
        end(3, error=error("ValueError", "boom", STEP, at=999.8)),
        *(end(rank, error=lost) for rank in (0, 1, 2)),
        end(4, at=1000.3, error=error("KeyError", "'x'", MAIN, at=1000.0)),
        end(5, 7, at=1000.4),
        end(6, 0, at=900.0),
        stopped(7),
    ]
    assert report(*exits) == expect("""
    error: rank 3 failed: ValueError: boom   (exit status 1, after 4 s)

      train.py:88 in train_step
        loss = model(batch)

      rank 3   pid 4703  cuda:3
      logs logs/rank-3.err
      rank 4 failed 0.2 s later: KeyError: 'x'   (train.py:120)
      rank 5 failed 0.6 s later: exit status 7
      ranks 0-2 then lost contact with it, in train.py:88 in train_step
      rank 6 finished with status 0
      rank 7 was stopped by SIGTERM in 0.1 s
    """)


def test_many_later_failures_are_bounded() -> None:
    exits = [end(rank, at=1000 + rank, error=error("ValueError", f"bad {'abcdefghij'[rank]}")) for rank in range(10)]
    assert report(*exits) == expect("""
    error: rank 0 failed: ValueError: bad a   (exit status 1, after 4 s)

      rank 0   pid 4700  cuda:0
      logs logs/rank-0.err
      rank 1 failed 1 s later: ValueError: bad b
      rank 2 failed 2 s later: ValueError: bad c
      rank 3 failed 3 s later: ValueError: bad d
      rank 4 failed 4 s later: ValueError: bad e
      rank 5 failed 5 s later: ValueError: bad f
      ranks 6-9 failed too
    """)


def test_a_peer_that_had_left_with_0_is_named() -> None:
    lost = error("RuntimeError", PEER_LOST, STEP, at=1000.0)
    also = error("RuntimeError", PEER_LOST.replace("9634", "77"), MAIN, at=1000.1)
    assert report(end(0, error=lost), end(1, error=also), end(2, 0, at=998.8), stopped(3)) == expect("""
    error: rank 0 failed: RuntimeError: Connection closed by peer [127.0.0.1]:9634.   (exit status 1, after 4 s)

      train.py:88 in train_step
        loss = model(batch)

      rank 0   pid 4700  cuda:0
      logs logs/rank-0.err
      rank 1 lost contact too, in train.py:120
      rank 2 had exited with status 0, 1.2 s before
      rank 3 was stopped by SIGTERM in 0.1 s

    hint: a worker ended while others still needed it: see that all ranks do the same number of steps (uneven data?)
    """)


def test_a_culprit_that_was_stopped_on_its_way_out() -> None:
    culprit = replace(stopped(1), error=error("ValueError", "boom", STEP, at=999.0))
    assert report(end(0, error=error("RuntimeError", PEER_LOST, STEP, at=999.5)), culprit) == expect("""
    error: rank 1 failed: ValueError: boom   (stopped while it was exiting, after 4 s)

      train.py:88 in train_step
        loss = model(batch)

      rank 1   pid 4701  cuda:1
      logs logs/rank-1.err
      rank 0 then lost contact with it, in train.py:88 in train_step
    """)


def test_a_syntax_error_in_the_script() -> None:
    traceback = f'  File "{CWD}/train.py", line 7\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'
    broken = error("SyntaxError", "invalid syntax (train.py, line 7)", traceback=traceback)
    assert report(end(0, error=broken), end(1, error=broken)) == expect("""
    error: rank 0 failed: SyntaxError: invalid syntax (train.py, line 7)   (exit status 1, after 4 s)

      train.py:7
        def f(:
              ^

      rank 0   pid 4700  cuda:0
      logs logs/rank-0.err
      both ranks failed with the same error
    """)


def test_a_module_that_is_not_there() -> None:
    missing = error(
        "ModuleNotFoundError",
        "No module named 'torchvision'",
        frame(f"{CWD}/train.py", 3, "<module>", "import data"),
        frame(f"{CWD}/data.py", 1, "<module>", "import torchvision"),
        frame("<frozen importlib._bootstrap>", 1176, "_find_and_load"),
        traceback="ModuleNotFoundError: No module named 'torchvision'\n",
    )
    assert report(end(0, error=missing), stopped(1), facts=Evidence(interpreter="/opt/venv/bin/python")) == expect("""
    error: rank 0 failed: ModuleNotFoundError: No module named 'torchvision'   (exit status 1, after 4 s)

      data.py:1
        import torchvision

      rank 0   pid 4700  cuda:0
      logs logs/rank-0.err
      the other worker was stopped by SIGTERM in 0.1 s

    hint: /opt/venv/bin/python has no module `torchvision`: install it there, or choose another with `--python`
    """)


def test_an_error_of_which_only_the_text_is_known() -> None:
    """As torch's @record writes it."""
    traceback = (
        "Traceback (most recent call last):\n"
        '  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/elastic/multiprocessing/errors/__init__.py",'
        " line 361, in wrapper\n    return f(*args, **kwargs)\n           ^^^^^^^^^^^^^^^^^^\n"
        f'  File "{CWD}/train.py", line 88, in train_step\n    loss = model(batch)\n           ^^^^^^^^^^^^\n'
        "ValueError: boom\n"
    )
    assert report(end(0, error=error("ValueError", "boom", traceback=traceback)), stopped(1)) == expect("""
    error: rank 0 failed: ValueError: boom   (exit status 1, after 4 s)

      train.py:88 in train_step
        loss = model(batch)
               ^^^^^^^^^^^^

      rank 0   pid 4700  cuda:0
      logs logs/rank-0.err
      the other worker was stopped by SIGTERM in 0.1 s
    """)


def test_the_last_generation_of_a_job_with_restarts() -> None:
    assert report(end(0, error=error("ValueError", "", STEP)), stopped(1), restarts=3) == expect("""
    error: rank 0 failed: ValueError   (exit status 1, after 4 s)

      train.py:88 in train_step
        loss = model(batch)

      rank 0   pid 4700  cuda:0
      logs logs/rank-0.err
      the other worker was stopped by SIGTERM in 0.1 s
      3 of 3 restarts used
    """)


@given(text=st.text(), kind=st.text(min_size=1), tail=st.text(), signal=st.sampled_from([None, SIGSEGV, SIGABRT]))
def test_whatever_a_worker_said_the_report_has_its_shape(text: str, kind: str, tail: str, signal: int | None) -> None:
    said = error(kind, text, traceback=tail) if signal is None else None
    shown = report(end(0, signal=signal, error=said, tail=tail), stopped(1))
    assert shown.startswith("error: rank 0 failed: ")
    assert "\n  rank 0   pid 4700  cuda:0\n  logs logs/rank-0.err\n" in shown
    assert shown.endswith("\n")
    assert "\x1b[" not in shown


POINTED = (
    "Traceback (most recent call last):\n"
    f'  File "{CWD}/train.py", line 120, in <module>\n    main()\n'
    f'  File "{CWD}/train.py", line 88, in train_step\n    loss = model(batch)\n           ^^^^^^^^^^^^\n'
)


def test_a_pointer_stands_below_the_line_of_code_where_python_has_printed_one() -> None:
    assert "    loss = model(batch)\n           ^^^^^^^^^^^^\n\n" in report(
        end(0, error=error("ValueError", "boom", MAIN, STEP, traceback=POINTED))
    )
    assert "    main()\n\n" in report(end(0, error=error("ValueError", "boom", MAIN, traceback=POINTED)))


def painted(*, links: bool = False, paint: Paint | None = None) -> str:
    failed = end(3, error=error("ValueError", "\x1b[31mred\x1b[0m", MAIN, STEP, FORWARD, traceback=POINTED))
    others = (stopped(0), replace(end(1), error=error("KeyError", "\x1b]8;;file:///etc/shadow\x1b\\press"), at=1001.0))
    cause = Cause(name="x", advice="type `ulimit -n 4096`, or not")
    found = FailureReport(first=failed, exits=(failed, *others), cause=cause, cwd=CWD)
    return render(found, paint or Paint(colour=True, links=links))


@pytest.mark.parametrize("links", [False, True])
def test_in_colours_and_with_links_it_reads_the_same(links: bool) -> None:
    assert plain(painted(links=links)) == painted(paint=Paint())
    assert visible(painted(links=links)) == painted(links=links), "and the terminal gets them"


def test_the_error_the_code_and_the_pointer_stand_out_and_the_rest_is_dim() -> None:
    text = painted()
    assert text.startswith("\x1b[1;31merror:\x1b[0m\x1b[1m rank 3 failed: ValueError: red")
    assert "\n  \x1b[36mtrain.py:88 in train_step\x1b[0m\n  \x1b[1m  loss = model(batch)\x1b[0m\n" in text
    assert (
        "\n  \x1b[1;31m         ^^^^^^^^^^^^\x1b[0m\n  \x1b[2mtorch/nn/modules/linear.py:125 in forward\x1b[0m\n"
        in text
    )
    assert "\n  \x1b[2mrank 3   pid 4703  cuda:3\x1b[0m\n  \x1b[2mlogs \x1b[0mlogs/rank-3.err\n" in text
    assert "\n\x1b[1;36mhint:\x1b[0m type \x1b[36m`ulimit -n 4096`\x1b[0m, or not\n" in text


def test_places_and_logs_lead_to_their_files_and_no_text_of_a_worker_leads_anywhere() -> None:
    text = painted(links=True)
    for file in (f"{CWD}/train.py", FORWARD.file, f"{CWD}/logs/rank-3.err"):
        assert f"\x1b]8;;file://gpu01{file}\x1b\\" in text
    assert text.count("\x1b]8;;file://") == text.count("\x1b]8;;\x1b\\") == 3
    assert "\\x1b]8;;file:///etc/shadow" in text
    odd = Paint(links=True).line((Words("x", file="/a b/\udcff#?%.py"),), "h")
    assert odd == "\x1b]8;;file://h/a%20b/%FF%23%3F%25.py\x1b\\x\x1b]8;;\x1b\\"
    assert Paint(links=True).line((Words("<string>:1", file="<string>"),)) == "<string>:1"


def test_without_a_terminal_it_is_plain_text() -> None:
    failed = end(0, error=error("ValueError", "\x1b[31mred\x1b[0m"))
    text = render(FailureReport(first=failed, exits=(failed,)))
    assert text.startswith("error: rank 0 failed: ValueError: red")
    assert "\x1b" not in text


def test_other_reports_have_their_labels_coloured() -> None:
    text = "error: the job hangs\n\n  error: not ours\n\nhint: wait\n"
    assert Paint().report(text) == text
    assert Paint(colour=True).report(text) == (
        "\x1b[1;31merror:\x1b[0m the job hangs\n\n  error: not ours\n\n\x1b[1;36mhint:\x1b[0m wait\n"
    )


def test_a_sentence_is_broken_between_words_where_the_terminal_ends_and_nothing_else_is() -> None:
    long = "/data/" + "x" * 60
    report = f"error: rank 0 failed: no file   (exit status 1, after 4 s)\n\n  {long} is gone\n\nhint: `cp {long} .` or wait\n"
    assert Paint(columns=40).report(report) == (
        f"error: rank 0 failed: no file\n  (exit status 1, after 4 s)\n\n  {long} is gone\n\nhint:\n  `cp {long} .`\n  or wait\n"
    )
    coloured = Paint(colour=True, columns=40).report(painted(paint=Paint(colour=True)))
    assert plain(coloured) == Paint(columns=40).report(painted(paint=Paint()))


@pytest.mark.parametrize("signum", [SIGKILL, SIGTERM, 40])
def test_a_signal_is_named(signum: int) -> None:
    assert render(FailureReport(first=end(0, signal=signum), exits=())).startswith("error: rank 0 failed: killed by ")
