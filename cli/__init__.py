"""The `kvferry` command."""
