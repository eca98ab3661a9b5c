"""The operating system, and words: the loop, processes, addresses, the terminal, errors and exit statuses. Knows no job."""
