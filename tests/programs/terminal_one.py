"""A worker that says what terminal it has, then does what its argument says with it."""

import os
import signal
import sys

rank = os.environ["RANK"]


def place():
    size = os.get_terminal_size(0) if os.isatty(0) else None
    print(f"rank {rank}:", *(os.isatty(fd) for fd in (0, 1, 2)), size and f"{size.lines} x {size.columns}", flush=True)


def resize():
    """Say each new size until the terminal is 50 lines high."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])  # one that comes before the wait is waited for
    print("ready", flush=True)
    while os.get_terminal_size(0).lines != 50:
        signal.sigwait([signal.SIGWINCH])
    print(f"now {os.get_terminal_size(0).columns} columns", flush=True)


def ask():
    """Ask without a newline at the end, with line editing."""
    import readline

    readline.parse_and_bind("set enable-bracketed-paste off")
    while True:
        try:
            print(f"<{input('name? ')}>", flush=True)
        except EOFError:
            print("<end>", flush=True)
            return


def edit():
    """Die in the middle of a line that is being edited."""
    import readline

    readline.set_startup_hook(lambda: os.kill(os.getpid(), signal.SIGKILL))
    input("never read ")


def read():
    print(f"rank {rank} read {sys.stdin.read()!r}", flush=True)


def colours():
    print("plain", flush=True)


def fail():
    """Write a text as it is given, and fail."""
    sys.stdout.write(sys.argv[2])
    sys.stdout.flush()
    sys.exit(3)


globals()[sys.argv[1]]()
