"""A script written for torchrun."""

import os

import torch
from place import write_place

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
write_place()
