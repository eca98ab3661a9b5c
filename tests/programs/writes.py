"""A worker that writes what its argument says: `writes.py lines 200`. Bytes go out with os.write, as they are."""

import os
import signal
import sys

from signs import RANK, all_ready, put, wait


def line(number: int) -> bytes:
    """A line that tells whose it is and whether it is whole."""
    return b"<%d:%d:%b>\n" % (RANK, number, b"abcdefghij" * (number % 7))


def everything(data: bytes, fd: int = 1) -> None:
    while data:
        data = data[os.write(fd, data) :]


def letters(number):
    """Lines, one system call for each byte."""
    all_ready()
    for at in range(int(number)):
        for byte in line(at):
            os.write(1, bytes([byte]))


def prints(number):
    """Lines by print with two arguments, which is four system calls when unbuffered."""
    all_ready()
    for at in range(int(number)):
        print(f"<{RANK}", f"{at}>")


def both():
    everything(b"out of %d\n" % RANK)
    everything(b"err of %d\n" % RANK, 2)


def same():
    """Two lines that every rank writes alike, and one of its own."""
    all_ready()
    everything(b"equal\n")
    everything(b"equal too\n")
    everything(b"mine is %d\n" % RANK)


def long(size):
    all_ready()
    everything(b"%d" % RANK * int(size) + b"\n")


def crooked():
    """Bytes that are no UTF-8, and a letter in two halves with another rank's line written between them."""
    all_ready()
    if RANK == 0:
        everything(b"\xff\xfe\x80\n")
        everything("gr\u00fc\u00df".encode()[:3])
        put("half")
        wait("between")
        everything("gr\u00fc\u00df".encode()[3:] + b"\n")
    else:
        wait("half")
        everything(b"between\n")
        put("between")


def unfinished():
    everything(b"first\nno newline")


def then_exits(size):
    """Rank 0 ends badly with much of what it wrote still in the pipe; the others have ended well before."""
    if RANK:
        return
    everything((b"y" * 99 + b"\n") * (int(size) // 100))
    os._exit(7)


def then_is_killed(size):
    if RANK:
        return
    everything((b"y" * 99 + b"\n") * (int(size) // 100))
    os.kill(os.getpid(), signal.SIGKILL)


def after_the_reader_left():
    """One line, then, when the reader of the command's stdout is gone, many more; rank 1 ends badly."""
    everything(b"first\n")
    wait("reader-gone")
    for at in range(1000):
        everything(line(at))
    put(f"done-{RANK}")
    if RANK == 1:
        wait("done-0")
        os._exit(5)


def flood(size):
    """Many lines, then the sign done-RANK."""
    all_ready()
    for at in range(int(size) // 1000):
        everything(b"%d:%06d:" % (RANK, at) + b"z" * 990 + b"\n")
    put(f"done-{RANK}")


def leaves_a_writer():
    """End at once, while a child goes on writing as fast as it can."""
    if os.fork() == 0:
        data = b"still here\n" * 5000
        while True:
            os.write(1, data)
    os._exit(3)


def descriptors():
    """Name the three standard descriptors, and those that should not be there, in a sign."""
    names = [f"{fd}={os.readlink(f'/proc/self/fd/{fd}').partition(':')[0]}" for fd in range(3)]
    own = os.open(".", os.O_RDONLY)
    others = [fd for fd in range(3, own) if os.path.exists(f"/proc/self/fd/{fd}")]
    put(f"fds-{RANK}", f"{' '.join(names)} others={others}")


globals()[sys.argv[1]](*sys.argv[2:])
