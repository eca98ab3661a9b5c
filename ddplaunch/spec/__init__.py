"""What was asked for: the job with its options, the program, and how workers end."""
