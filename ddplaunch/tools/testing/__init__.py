"""Tests that run on every rank: the pytest plugin, and its part in a worker (`rank`). Workers are started by `launch()` alone."""
