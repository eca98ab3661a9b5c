"""What a run leaves, and what is seen of it: folders, rows of events, failed machines, stacks, the socket where it answers."""
