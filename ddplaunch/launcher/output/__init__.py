"""What workers print, from the bytes of their pipes to logs and console. Pure but for the log files; knows no job."""
