"""What torch 2.13 does among its rules for tensors without data though it is needed without these: it has generators made."""

import torch

if hasattr(torch._C, "_set_generator_metaclass"):
    from torch._opaque_base import OpaqueBaseMeta

    torch._C._set_generator_metaclass(OpaqueBaseMeta)
