"""A launcher of MPI that has started the command: several workers do not take its place, each of them, for their own."""

import json

import pytest

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "PMIX_RANK": "0",
    "PMIX_NAMESPACE": "prterun-head-37@1",
}


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize("workers", [1, 2])
def test_only_a_worker_that_is_the_whole_task_has_the_place_of_the_task(job, program, workers, method):
    env = {**OPEN_MPI, "OMPI_MCA_btl": "self"}
    job.start("--nproc-per-node", workers, "--start-method", method, program("variables"), env=env)
    job.wait().expect(0)
    for found in map(json.loads, job.signs("variables", workers)):
        assert found["OMPI_MCA_btl"] == "self"
        assert {name: found[name] for name in OPEN_MPI.keys() & found.keys()} == (OPEN_MPI if workers == 1 else {})
