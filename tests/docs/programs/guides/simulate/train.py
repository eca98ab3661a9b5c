import os
import time

start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, start {start}")
time.sleep(60 if start == 0 and "IS_BROKEN" in os.environ else 0)  # seconds: longer than it takes to be broken
