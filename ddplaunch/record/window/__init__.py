"""The questions that somebody outside of a job may ask, and the answers."""
