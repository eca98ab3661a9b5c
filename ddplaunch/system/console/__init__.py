"""What people look at: what a terminal is and takes, whole lines, tables."""
