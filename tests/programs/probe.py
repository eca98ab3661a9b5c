"""The hardware that is found where DIRECTORY stands for /: probe.py DIRECTORY."""

import os
import sys

from ddplaunch.plan.devices.node import probe

found = probe(os.environ, root=sys.argv[1])
assert "torch" not in sys.modules
print(repr(found))
