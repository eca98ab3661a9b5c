import ctypes
import os
import signal


def broken_kernel():
    ctypes.string_at(0)


# the page shows the numbers of these lines
broken_kernel() if os.environ["RANK"] == "1" else signal.pause()
