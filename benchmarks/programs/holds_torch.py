"""Imports torch, puts up its pid, and waits for ever: holds_torch.py FOLDER."""

import os
import signal
import sys

import torch  # noqa: F401 - it is what is measured

open(f"{sys.argv[1]}/{os.getpid()}", "w").close()
signal.pause()
