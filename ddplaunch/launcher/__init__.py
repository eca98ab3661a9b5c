"""Runs a job: decides, starts and supervises workers, coordinates nodes, shows and reports."""
