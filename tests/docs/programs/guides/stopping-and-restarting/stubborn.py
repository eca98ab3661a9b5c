import os
import signal
import sys
import time

rank = os.environ["RANK"]
print("ready")
signal.signal(signal.SIGTERM, signal.SIG_IGN if rank == "2" else lambda *_: sys.exit())
while True:
    time.sleep(0.05)  # not pause(), which would miss a signal that comes right before it
