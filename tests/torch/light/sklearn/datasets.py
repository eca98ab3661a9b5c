"""The digits of scikit-learn, as it reads them, without the rest of it."""

from importlib.metadata import distribution
from types import SimpleNamespace

import numpy as np


def load_digits(*, return_X_y=False):  # noqa: N803 - scikit-learn's name
    path = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    table = np.loadtxt(str(path), delimiter=",")
    if return_X_y:
        return table[:, :-1], table[:, -1].astype(int)
    return SimpleNamespace(data=table[:, :-1], images=table[:, :-1].reshape(-1, 8, 8), target=table[:, -1].astype(int))
