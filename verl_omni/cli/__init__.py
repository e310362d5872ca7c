"""The verl-omni command: one file a subcommand."""
