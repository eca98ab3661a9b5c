"""torch's store at MASTER_PORT is hosted where a client of it waits, though no worker of node 0 wants it."""


def test_a_client_on_another_node_is_served_while_nobody_on_node_0_has_torch(job, program):
    stub = {"PYTHONPATH": str(program("stub_torch").with_suffix(""))}
    result = job.run("--nnodes", 2, "--simulate", program("wants_store"), env=stub)
    assert (result.status, job.sign("imported")) == (0, "False"), result.err
