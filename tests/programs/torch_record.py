"""A training script as torch's documentation asks for it: rank 1 of two fails in a main that @record watches."""

from signs import RANK, all_ready
from torch.distributed.elastic.multiprocessing.errors import record


def train():
    raise ValueError(f"rank {RANK} cannot learn")


@record
def main():
    all_ready()
    if RANK == 1:
        train()


main()
