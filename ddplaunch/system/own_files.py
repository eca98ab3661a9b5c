"""The folder of the package, and the programs in it that are run by their path."""

import os

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def worker_program(name: str) -> str:
    """Return the path of a program of `worker/`: "bootstrap.py"."""
    return os.path.join(PACKAGE, "worker", name)
