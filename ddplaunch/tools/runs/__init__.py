"""Commands that look into running jobs, and end them: they find the sockets of runs and ask; each job answers for itself."""
