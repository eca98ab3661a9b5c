"""A worker that tells how far it is: 10 of 40, after the sign go-1 20; it prints as many lines as its argument says in between.

After go-2 rank 1 raises. What its stdin held is its first line.
"""

import sys

from signs import RANK, wait

import ddplaunch

ddplaunch.progress(10, 40)
print("stdin has", repr(sys.stdin.read()), flush=True)
wait("go-1")
for number in range(int(sys.argv[1])):
    print("line", number, "x" * 60)
ddplaunch.progress(20, 40)
print("flooded", flush=True)
wait("go-2")
if RANK == 1:
    raise ValueError("bad batch")
wait("never")
