"""Fails inside a function that torch's `@record` watches: recorded.py [elsewhere]."""

import sys

from torch.distributed.elastic.multiprocessing.errors import record


class Unusual(ValueError):
    pass


@record
def main():
    raise Unusual("watched")


if sys.argv[1:] == ["elsewhere"]:
    try:
        main()
    except Unusual:
        raise KeyError("later") from None
main()
