"""The `kvferry` command: its subcommands, checks, and the supervisor of a local cluster."""
