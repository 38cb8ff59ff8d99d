"""The command line: a file a verb, no logic. Exceptions become exit codes in ``exits`` only."""
