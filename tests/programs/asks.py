"""Rank 0 asks for a name; rank 1 writes a line while it waits for the answer."""

from signs import RANK, put, wait

if RANK:
    wait("go")
    print("meanwhile")
    wait("answered")
else:
    answer = input("name? ")
    print("hello", answer)
    put("answered")
