"""The decode process: grants blocks, receives them, generates and streams tokens."""
