"""The command line, one file a command: env, demo, check, bench, train."""
