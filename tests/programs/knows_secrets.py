"""A worker that must have its secrets whole, waits until it may go on, and then raises an exception that tells them."""

import os
import sys

from signs import RANK, put, wait

argv = [
    "--hf-token",
    "hush-1",
    "--api-key=hush-2",
    "wandb.api_key=hush-3",
    "--max-tokens",
    "512",
    "--name",
    "hush-known-4",
]
assert sys.argv[1:] == argv, sys.argv
assert os.environ["DB_PASSWORD"] == "hush-5"
assert os.environ["MY_TOKEN"] == "hush-known-4"
put(f"ready-{RANK}", "")
wait("go")
raise ValueError(f"no login with password='{os.environ['DB_PASSWORD']}' at https://me:hush-6@host for {argv[-1]}")
