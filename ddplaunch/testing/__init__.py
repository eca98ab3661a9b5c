"""Tests that run on every rank: the pytest plugin (`plugin`), and what of it runs in a worker (`rank`)."""
