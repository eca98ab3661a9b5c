"""Which worker this is, by the variables."""

import pytest

from ddplaunch.worker.notice import Ranks, ranks


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, Ranks(0, 1)),
        ({"RANK": "", "WORLD_SIZE": ""}, Ranks(0, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Ranks(0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8", "SLURM_PROCID": "5"}, Ranks(3, 8)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, Ranks(0, 1)),  # a batch script has them too
    ],
)
def test_the_place_is_what_a_launcher_says_or_that_of_a_single_process(env, expected):
    assert ranks(env) == expected


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0"}, "RANK is set and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE is set and RANK is not"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK is 4, but WORLD_SIZE is 4: ranks count from 0"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK is '-1', which is no number"),
        ({"RANK": "one", "WORLD_SIZE": "4"}, "RANK is 'one', which is no number"),
    ],
)
def test_variables_that_cannot_be_are_an_error(env, message):
    with pytest.raises(ValueError, match=message):
        ranks(env)
