"""Writes numbered lines of 70 bytes to stdout, so many in each write.

writes.py LINES LINES_PER_WRITE
"""

import os
import sys

lines, together = int(sys.argv[1]), int(sys.argv[2])
rank = os.environ["RANK"]
for start in range(0, lines, together):
    numbers = range(start, min(lines, start + together))
    block = "".join(f"rank {rank} line {number:010d} ".ljust(69, "x") + "\n" for number in numbers).encode()
    while block:
        block = block[os.write(1, block) :]
