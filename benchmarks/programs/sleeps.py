"""Prints a line and sleeps."""

import time

print("sleeps", flush=True)
time.sleep(600)
