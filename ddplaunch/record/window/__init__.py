"""The window of a running job: what an observer may ask over its socket and what comes back, and the rows of --live."""
