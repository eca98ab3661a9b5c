"""What forks workers from one interpreter: the fork server of a job, the interpreter that is kept warm and the guard of a run."""
