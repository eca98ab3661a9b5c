"""The command line: parses arguments, calls the launcher, gives the exit status. No other folder imports click."""
