import os
import signal
import sys

rank = os.environ["RANK"]
print("ready")
signal.signal(signal.SIGTERM, signal.SIG_IGN if rank == "2" else lambda *_: sys.exit())
while True:
    signal.pause()
