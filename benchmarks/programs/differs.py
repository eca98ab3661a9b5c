"""Does one thing that launchers treat differently, as its first argument says: 7, both, raise, child, threads or print."""

import os
import subprocess
import sys
import time

what, folder = sys.argv[1], sys.argv[2]
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
open(f"{folder}/ready-{rank}", "w").close()
while len(os.listdir(folder)) < world_size:
    time.sleep(0.001)
last = rank == world_size - 1
if what == "7" and last:
    os._exit(7)
if what == "both" and last:
    os._exit(5)
if what == "both" and rank == 0:
    time.sleep(0.02)
    os._exit(4)
if what == "raise" and last:
    raise ValueError("the cause")
if what == "child" and last:
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    os._exit(1)
if what == "threads":
    print(os.environ.get("OMP_NUM_THREADS", "unset"))
elif what == "print":
    for number in range(10_000):
        print("rank", rank, "line", number)
else:
    time.sleep(600)
