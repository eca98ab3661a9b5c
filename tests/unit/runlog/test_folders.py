"""Where a user's runs are kept, by the variables that say it."""

import os
import pwd

import pytest

from ddplaunch.runlog.folders import runs_folder

OF_USER = f"{pwd.getpwuid(os.getuid()).pw_dir}/.local/state/ddplaunch/runs"


@pytest.mark.parametrize(
    ("env", "folder"),
    [
        ({"HOME": "/home/ada"}, "/home/ada/.local/state/ddplaunch/runs"),
        ({"HOME": ""}, OF_USER),  # not the root folder
        ({}, OF_USER),
        ({"HOME": "relative"}, None),
        ({"HOME": "/home/ada", "XDG_STATE_HOME": "/state"}, "/state/ddplaunch/runs"),
        ({"HOME": "/home/ada", "XDG_STATE_HOME": "state"}, "/home/ada/.local/state/ddplaunch/runs"),
    ],
)
def test_the_folder_of_runs(env, folder):
    assert runs_folder(env) == folder
