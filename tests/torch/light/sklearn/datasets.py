"""The digits of scikit-learn, as it reads them, without the rest of it."""

from importlib.metadata import distribution
from types import SimpleNamespace

import numpy as np


def load_digits():
    path = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    table = np.loadtxt(str(path), delimiter=",")
    return SimpleNamespace(data=table[:, :-1], images=table[:, :-1].reshape(-1, 8, 8), target=table[:, -1].astype(int))
