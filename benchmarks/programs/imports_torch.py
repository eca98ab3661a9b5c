"""Imports torch, as every training script does."""

import torch

torch.zeros(1)
