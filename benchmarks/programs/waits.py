"""Waits for ever, but for the last rank if it is told to crash: that one waits for all others, notes the time and ends.

waits.py FOLDER [crash] [stubborn] [compute=SECONDS: then communicate, and find that somebody is gone]
"""

import os
import signal
import sys
import time

folder, words = sys.argv[1], sys.argv[2:]
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if "stubborn" in words:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"{folder}/ready-{rank}", "w").close()
if "crash" in words and rank == world_size - 1:
    while len(os.listdir(folder)) < world_size:
        time.sleep(0.001)
    time.sleep(0.2)  # the launcher is to be at rest, as after hours of training
    with open(f"{folder}/crashed", "w") as file:
        file.write(f"{time.monotonic()!r}")
    os._exit(3)
if computing := [word for word in words if word.startswith("compute=")]:
    time.sleep(float(computing[0].partition("=")[2]))
    os._exit(1)
while True:
    signal.pause()
