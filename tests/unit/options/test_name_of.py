"""What a job of `launch()` is called: by its function and its file, in a word that any command can take."""

import os
from functools import partial

import pytest

from ddplaunch.tools.functions.pickling import name_of

HERE = os.path.basename(__file__)


def train() -> None:
    """A function of this file."""


class Model:
    def __call__(self) -> None:
        pass


def test_a_function_is_called_by_its_file_and_a_partial_by_what_it_calls():
    assert name_of(train) == f"{HERE}:train"
    assert name_of(partial(partial(train))) == f"{HERE}:train"
    assert name_of(Model().__call__) == f"{HERE}:Model.__call__"
    assert name_of(Model()) == "Model"


@pytest.mark.parametrize("name", ["a\0b", "x" * 1_000_000, "a\nb\x1b[2J", "\udcff"])
def test_whatever_a_function_is_called_its_name_is_one_short_printable_word(name):
    def renamed() -> None: ...

    renamed.__qualname__ = name
    assert name_of(renamed).isprintable()
    assert len(name_of(renamed)) <= 1000
