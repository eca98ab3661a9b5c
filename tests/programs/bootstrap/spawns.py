"""Sends objects of classes that it defines through worker processes: spawns.py spawn|forkserver|fork."""

import multiprocessing
import sys


class Point:
    def __init__(self, x):
        self.x = x


def work(point):
    return type(point).__module__, work.__module__, point.x * 2, __name__


if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        print(pool.map(work, [Point(1), Point(2), Point(3)]))
    print(Point.__module__, sys.argv)
