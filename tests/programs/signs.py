"""How a misbehaving worker tells the test where it is: small files, put up whole."""

import itertools
import os
import time

RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
FOLDER = os.environ["DDP_TEST_DIR"]

_numbers = itertools.count()


def put(name: str, text: object = "") -> None:
    """Put up a sign."""
    path = os.path.join(FOLDER, name)
    # a name of its own each time: a signal handler may put up a sign in the middle of this
    with open(f"{path}.{os.getpid()}.{next(_numbers)}", "w") as file:
        file.write(str(text) or " ")
    os.rename(file.name, path)


def put_all(name: str, words: list) -> None:
    """Put up a list that grows in signal handlers: one of them may come in the middle of this, and put up more words."""
    put(name, text := " ".join(words))
    while text != (now := " ".join(words)):
        put(name, text := now)


def wait(name: str) -> None:
    """Wait until somebody has put up this sign."""
    while not os.path.exists(os.path.join(FOLDER, name)):
        time.sleep(0.002)


def all_ready() -> None:
    """Say that this rank is ready, and wait until every rank is."""
    put(f"ready-{RANK}", os.getpid())
    name = "ready"
    if (restarts := os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) != "0":  # signs of those before are still up
        name = f"restart-{restarts}"
        put(f"{name}-{RANK}")
    for rank in range(WORLD_SIZE):
        wait(f"{name}-{rank}")


def wait_for_ever() -> None:
    """Run signal handlers; pause() would notice one that comes right before it only with the next."""
    import signal

    woken, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    while True:
        os.read(woken, 1)
