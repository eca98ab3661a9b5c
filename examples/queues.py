"""Send tensors from process to process through queues, and see what is copied, how fast it is, and what goes wrong.

    ddplaunch examples/queues.py
    ddplaunch examples/queues.py --megabytes 32 --count 100

Shows that `put` copies a tensor into shared memory once, and never again; measures Queue against SimpleQueue, new tensors
against buffers that the receiver sends back, and both against arrays that are pickled; and shows the pitfall, a sender
that ends before its tensor is received.
"""

from __future__ import annotations

import argparse
import time
from multiprocessing.queues import Queue, SimpleQueue
from multiprocessing.synchronize import Event
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

BUFFERS = 4  # tensors on the way at a time; without a limit a fast sender would fill /dev/shm
SMALL = 4096  # bytes

Kept = dict[int, Tensor]  # by address
if TYPE_CHECKING:  # they are generic for type checkers only
    Channel = SimpleQueue[Any] | Queue[Any]


def keep(tensor: Tensor, kept: Kept) -> None:
    """Hold on to a buffer that will come back: then torch finds its memory mapped, and does not map it again."""
    kept[tensor.data_ptr()] = tensor


def produce(how: str, size: int, count: int, out: Channel, back: Channel, copied: Tensor) -> None:
    """Send `count` tensors of `size` bytes, each filled with its number; note how many bytes `put` has to copy."""
    torch.set_num_threads(1)  # there are two processes at work, and more threads would only wait for each other
    kept: Kept = {}
    for number in range(count):
        # what comes back is a buffer to fill again or, if those are not reused, None
        returned = back.get() if number >= BUFFERS else None
        tensor = torch.empty(size // 4) if returned is None else returned
        tensor.fill_(number)
        copied += 0 if tensor.is_shared() else size
        if how == "pickled":
            out.put(tensor.numpy())  # torch shares tensors only: an array goes through the pipe, byte by byte
        else:
            out.put(tensor)
            if how == "reused":
                keep(tensor, kept)
    for _ in range(min(BUFFERS, count)):
        back.get()  # whoever sends must not end before all has been received


def measure(queue: str, how: str, size: int, count: int) -> None:
    """Receive what another process sends, check it, and print how fast it came."""
    context = mp.get_context("forkserver")
    make = context.Queue if queue == "Queue" else context.SimpleQueue
    out, back = make(), make()
    copied = torch.zeros((), dtype=torch.int64).share_memory_()
    # a daemon: should this process fail, python would wait in vain for the end of any other
    sender = context.Process(target=produce, args=(how, size, count, out, back, copied), daemon=True)
    sender.start()
    kept: Kept = {}
    began = time.perf_counter()
    for number in range(count):
        received = torch.as_tensor(out.get())
        if number == 0:
            began = time.perf_counter()  # the first one took as long as a process takes to start
        if how == "reused":
            keep(received, kept)
        back.put(received if how == "reused" else None)
    each = (time.perf_counter() - began) / (count - 1)
    sender.join()
    amount = f"{copied / 1e6:8.1f} MB" + (", several times" if how == "pickled" else "")
    print(f"{queue:12} {how:8} {size / each / 1e6:8,.1f} MB/s {1e6 * each:8,.0f} us each   {amount}", flush=True)


def answer(inbox: Channel, outbox: Channel) -> None:
    """Write 7 to the tensor that is received, and send it back."""
    tensor = inbox.get()
    tensor.fill_(7)
    outbox.put(tensor)
    inbox.get()  # the sender has it: now this process may end


def watch_a_tensor() -> None:
    """Follow one tensor by its address on its way to another process and back."""
    context = mp.get_context("forkserver")
    out, back = context.SimpleQueue(), context.SimpleQueue()
    other = context.Process(target=answer, args=(out, back), daemon=True)
    other.start()
    tensor = torch.zeros(1000)
    at_first = tensor.data_ptr()
    out.put(tensor)
    in_shared_memory = tensor.data_ptr()
    print(f"put moves the tensor to shared memory: {at_first:#x} -> {in_shared_memory:#x}, a copy")
    returned = back.get()
    out.put(None)
    other.join()
    print(f"what comes back lies at {returned.data_ptr():#x}, no copy; the other process wrote {tensor[0]:g} to it")


def send_one(out: Channel, received: Event | None) -> None:
    """Send one tensor, and end; if told to, not before it is received."""
    out.put(torch.ones(1000))
    if received is not None:
        received.wait()


def show_the_pitfall() -> None:
    """Receive from a sender that has ended, and from one that waits."""
    context = mp.get_context("forkserver")
    out, received = context.SimpleQueue(), context.Event()
    hasty = context.Process(target=send_one, args=(out, None), daemon=True)
    hasty.start()
    hasty.join()  # it has ended, with success; its tensor is in the queue
    try:
        out.get()
    except (FileNotFoundError, ConnectionError) as error:  # nobody is there to hand over the memory
        print(f"from a sender that has ended: {type(error).__name__}: {error}")
    patient = context.Process(target=send_one, args=(out, received), daemon=True)
    patient.start()
    tensor = out.get()
    received.set()
    patient.join()
    print(
        f"from a sender that waits until then: a tensor, there after the sender's end too; its sum is {tensor.sum():g}"
    )


def main() -> None:
    """Show, measure, show."""
    parser = argparse.ArgumentParser(description="Tensors through queues: what is copied, how fast, what goes wrong.")
    parser.add_argument("--megabytes", type=float, default=8, help="of a large tensor [8]")
    parser.add_argument("--count", type=int, default=40, help="tensors in each measurement, 5 times that if small [40]")
    args = parser.parse_args()
    if args.count <= BUFFERS:
        parser.error(f"--count must be above {BUFFERS}, or no buffer is reused")
    mp.set_sharing_strategy("file_descriptor")  # names in /dev/shm have another pitfall: they may be left behind
    mp.get_context("forkserver").set_forkserver_preload(["torch"])

    watch_a_tensor()
    for size, count in ((round(args.megabytes * 1e6) // 4 * 4, args.count), (SMALL, 5 * args.count)):
        print(f"\n{count} tensors of {size:,} bytes, {BUFFERS} on the way; what had to be copied", flush=True)
        for queue in ("SimpleQueue", "Queue"):
            for how in ("pickled", "new", "reused"):
                measure(queue, how, size, count)
    print()
    show_the_pitfall()


if __name__ == "__main__":
    main()
