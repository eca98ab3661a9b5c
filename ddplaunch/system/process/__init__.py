"""ACT on processes: start them, wait for them, read, signal, sweep. Decides nothing and shows nothing."""
