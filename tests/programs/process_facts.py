"""A worker that puts up as METHOD-RANK what it can find out of its process: `process_facts.py METHOD`."""

import torch  # isort: skip  # as a training script does

import atexit
import faulthandler
import gc
import json
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
from signs import RANK, put

status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
loggers = [logging.root, *(one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger))]
of_this_job = ("DDPLAUNCH_LOG_DIR", "DDPLAUNCH_TERM", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE")
of_processes = ("CapEff", "CapInh", "Groups", "NoNewPrivs", "SigBlk", "SigCgt", "SigIgn", "Umask")
same = {
    "variables": {name: value for name, value in os.environ.items() if name not in of_this_job},
    "status": {name: status[name].split() for name in of_processes},
    "signals": {signum.name: str(signal.getsignal(signum)) for signum in signal.Signals},
    "limits": [resource.getrlimit(number) for number in range(16)],
    "descriptors": [os.readlink(f"/proc/self/fd/{fd}").partition(":")[0] for fd in (0, 1, 2)],
    "streams": [
        [one.name, one.mode, one.encoding, one.errors, one.line_buffering, one.write_through]
        for one in (sys.stdin, sys.stdout, sys.stderr)
    ],
    "open": len(os.listdir("/proc/self/fd")),
    "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), os.nice(0), sorted(os.sched_getaffinity(0))],
    "python": [
        sys.path,
        sys.orig_argv[:-1],
        str(sys.flags),
        str(sys.excepthook),
        sorted(vars(sys.modules["__main__"])),
    ],
    "modules": sorted(sys.modules),
    "hooks": [len(sys.meta_path), len(sys.path_hooks), atexit._ncallbacks(), faulthandler.is_enabled()],
    "loggers": sorted([one.name, one.level, len(one.handlers)] for one in loggers if one.handlers or one.level),
    "warnings": [str(one) for one in warnings.filters],
    "locale": locale.setlocale(locale.LC_ALL),
    "collector": [gc.isenabled(), gc.get_threshold()],
    "threads": [threading.active_count(), threading.main_thread().native_id == os.getpid()],
    "processes": [multiprocessing.get_start_method(allow_none=True), multiprocessing.current_process().name],
    "torch": [torch.get_num_threads(), torch.get_num_interop_threads(), torch.are_deterministic_algorithms_enabled()],
}
tensor, array = torch.ones(400, 400), np.ones((400, 400))
same["computing"] = [(tensor @ tensor).sum().item(), (array @ array).sum(), len(os.listdir("/proc/self/task"))]
own = [random.random(), np.random.rand(), torch.rand(1).item(), multiprocessing.current_process().authkey.hex()]
put(f"{sys.argv[1]}-{RANK}", json.dumps({"same": same, "own": own}))
