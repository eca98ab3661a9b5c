"""What is said of a check, from made-up traces."""

from ddplaunch.system.console.tables import Look, written
from ddplaunch.tools.check.compare import compare
from ddplaunch.tools.check.notes import Trace
from ddplaunch.tools.check.run import Wanted
from ddplaunch.tools.check.show import Checked, blocks


def shown(*traces: Trace) -> str:
    ranks = tuple(trace.rank for trace in traces)
    wanted = Wanted(world_size=8, nproc_per_node=8, ranks=ranks, steps=3, seconds=60.0)
    return written(
        blocks(Checked(wanted=wanted, traces=traces, compared=compare(traces, "/"), seconds=1.0, cwd="/")), Look()
    )


def test_a_check_that_too_many_collectives_ended_names_the_step_of_the_rank_that_asked_for_them():
    text = shown(Trace(rank=0, end="steps", steps=3), Trace(rank=5, end="calls", steps=0))
    assert "rank 5 asked for so many collectives that their check ended in step 1" in text
