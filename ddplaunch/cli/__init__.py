"""The command line: words in, a call, what it prints, the exit status. click lives here and nowhere else."""
