"""The options of the command: one table, which gives flags, variables, keys of files, help and argv. Reads no machine."""
