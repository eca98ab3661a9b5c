"""Our table against the parser of the torchrun that is installed: each of its options, its choices and its variables."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from ddplaunch.cli.job import parse
from ddplaunch.spec.options.table import BY_NAME
from tests.conftest import PATIENCE
from tests.torch.example import LIGHT

_ASK = """
import json
from argparse import SUPPRESS
from torch.distributed.argparse_util import check_env, env
from torch.distributed.run import get_args_parser
print(json.dumps([
    {"names": one.option_strings, "takes_value": one.nargs != 0, "choices": list(one.choices or ()),
     "variable": isinstance(one, (env, check_env))}
    for one in get_args_parser()._actions if one.option_strings and one.default is not SUPPRESS
]))
"""


_ASK_DASHES = """
import json, sys
from torch.distributed.run import get_args_parser
print(json.dumps([get_args_parser().parse_args(words).training_script_args for words in json.loads(sys.argv[1])]))
"""
_WITH_DASHES = [
    words.split()
    for words in ("a -- x", "-m a -- --depth=24", "--no-python a -- x", "a --", "a -- --", "a x -- y", "a -- -x", "-- a -- x")
]  # fmt: skip


@pytest.fixture(scope="module")
def theirs() -> list[dict[str, Any]]:
    asked = subprocess.run(
        [sys.executable, "-c", _ASK], env={**os.environ, **LIGHT}, capture_output=True, check=True, timeout=PATIENCE
    )
    return list(json.loads(asked.stdout))


def test_each_option_of_torchruns_is_one_of_ours(theirs: list[dict[str, Any]]) -> None:
    for action in theirs:
        option = BY_NAME[max(action["names"], key=len).lstrip("-").replace("-", "_")]
        for name in action["names"]:
            words = [name, *(["VALUE"] if action["takes_value"] else []), "train.py"]
            text = "VALUE" if action["takes_value"] else "1"
            assert [(one.name, one.text) for one in parse(words).given] == [(option.name, text)], name
        assert option.pet == action["variable"], option.name
        assert option.is_torchruns
        assert set(action["choices"]) - {"tcsh"} <= set(option.choices)  # click completes in other shells


def test_the_arguments_of_the_program_are_those_that_torchrun_hands_on() -> None:
    command = [sys.executable, "-c", _ASK_DASHES, json.dumps(_WITH_DASHES)]
    asked = subprocess.run(command, env={**os.environ, **LIGHT}, capture_output=True, check=True, timeout=PATIENCE)
    assert [list(parse(words).program[1:]) for words in _WITH_DASHES] == json.loads(asked.stdout)
