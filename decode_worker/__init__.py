"""Decode worker: grants blocks, receives them, generates and streams tokens."""
