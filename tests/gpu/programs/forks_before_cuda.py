"""A script whose child process must still be able to use CUDA after a fork, as data loaders do."""

import os

import torch
from place import write_place

child = os.fork()
if child == 0:
    torch.ones(1, device="cuda")
    os._exit(0)
if os.waitpid(child, 0)[1] != 0:
    raise RuntimeError("the forked child could not use CUDA")
write_place()
