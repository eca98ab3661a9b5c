"""The options of the command: one table, from which flags, variables, keys of files, help and argv are derived."""
