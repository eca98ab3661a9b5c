"""A worker that shows a progress bar: at 10 of 100 until the test has seen it, then at its end, and the worker ends."""

import sys

from signs import all_ready, wait

print("\r 10%|#         | 10/100 [00:04<00:05]", end="", file=sys.stderr, flush=True)
all_ready()
wait("seen")
print("\r100%|##########| 100/100 [00:04<00:05]", file=sys.stderr, flush=True)
