"""Ranks of a node on several hosts: how the hosts meet, stay alive together and move blocks."""
