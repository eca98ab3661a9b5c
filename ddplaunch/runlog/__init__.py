"""What is kept of a run: its folder, the process that writes it, its events, and its socket."""
