"""Imports torch; the last rank crashes once when all are there, and each notes when it is there again: restarts.py FOLDER."""

import os
import sys
import time

began = repr(time.monotonic())

import torch  # noqa: E402, F401 - the time is that of the first line

folder, rank = sys.argv[1], os.environ["RANK"]
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    with open(f"{folder}/again-{rank}", "w") as file:
        file.write(began)
    sys.exit()
open(f"{folder}/ready-{rank}", "w").close()
if int(rank) < int(os.environ["WORLD_SIZE"]) - 1:
    time.sleep(600)
while len(os.listdir(folder)) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.001)
time.sleep(0.2)
with open(f"{folder}/crashed", "w") as file:
    file.write(repr(time.monotonic()))
os._exit(3)
