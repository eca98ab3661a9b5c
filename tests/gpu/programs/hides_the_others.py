"""A script that chooses its GPU by the environment, before torch is imported."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]

from place import write_place  # after the variable, as torch must be

write_place()
