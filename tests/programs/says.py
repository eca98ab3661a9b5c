"""Says a line, waits until it is told to go on, and says another."""

from signs import RANK, put, wait

print("before", RANK)
put(f"ready-{RANK}")
wait("go")
print("after", RANK)
