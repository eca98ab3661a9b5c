"""Does nothing."""
