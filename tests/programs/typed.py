"""The command as it is typed in a folder: typed.py FOLDER [ARGS]..."""

import os
import sys

os.chdir(sys.argv.pop(1))
from ddplaunch.__main__ import main

main()
