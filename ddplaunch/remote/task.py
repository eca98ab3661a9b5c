"""An agent in a step that ddplaunch has started: `python -m ddplaunch.remote.task WORDS`.

The words say all that was asked for; variables and files were read where the command was typed.
"""

from __future__ import annotations

import os
import sys

from ddplaunch import cli, launcher
from ddplaunch.errors import LaunchError
from ddplaunch.remote.colons import unsheltered


def main() -> int:
    """Run the agent and give the exit status of its task: of a job that failed, one task says so, and not each of them."""
    try:
        spec = cli.asked(cli.parse("run", unsheltered(sys.argv[1:])), {}, None)
        status = launcher.run(spec, dict(os.environ))
        return status if os.environ.get("SLURM_NODEID") == "0" else 0
    except LaunchError as error:
        sys.stderr.write(error.render())
        return error.status


if __name__ == "__main__":
    sys.exit(main())
