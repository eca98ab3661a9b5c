"""Prints what a program can know of how it was started."""

import os
import signal
import sys

names = list(vars())
import __main__

print("names", names)
for name in ("__name__", "__doc__", "__package__", "__spec__", "__builtins__", "__file__", "__cached__"):
    print(name, globals().get(name))
print("__annotations__", globals().get("__annotations__"))
print("loader", type(__loader__).__name__, vars(__loader__))
print("main", __main__.__dict__ is globals(), sys.modules["__main__"] is __main__, __main__)
print("argv", sys.argv)
print("orig_argv", getattr(sys, "orig_argv", None))
print("path", sys.path)
print("flags", sys.flags)
print("modules", sorted(set(sys.modules) - {"faulthandler"}))
print("meta_path", sys.meta_path)
print("hooks", sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, sys.gettrace())
print("limit", sys.getrecursionlimit())
print("signals", [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)])
print("descriptors", os.listdir("/proc/self/fd"))
print("environment", sorted(os.environ.items()))
print("directory", os.getcwd())
