"""Writes the same block of lines of 70 bytes to stdout again and again, as fast as it is read.

floods.py BLOCKS
"""

import os
import sys

LINE = b"x" * 69 + b"\n"
BLOCK = LINE * (65536 // len(LINE))

for _ in range(int(sys.argv[1])):
    rest = BLOCK
    while rest:
        rest = rest[os.write(1, rest) :]
