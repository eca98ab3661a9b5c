"""The command that looks twice a second whether workers move, and names a job that has stood still for 2 s, and a worker that has
not ended 2 s after its script: `hurried.py ...`.
"""

from importlib import import_module

from ddplaunch.__main__ import main
from ddplaunch.launcher.start import node

if __name__ == "__main__":
    node._QUIET_CHECK_EVERY = 0.5
    vars(import_module("ddplaunch.launcher.decide.job.limits"))["IDLE_LINE_AFTER"] = 2.0
    vars(import_module("ddplaunch.launcher.node.ended_scripts"))["PATIENCE"] = 2.0
    main()
