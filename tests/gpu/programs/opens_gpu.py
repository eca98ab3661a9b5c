"""A module that uses the GPU when it is imported, as none should."""

import torch

torch.ones(1, device="cuda")
