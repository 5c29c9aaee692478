"""Where an attempt goes: pure functions of what the nodes report, in seconds. No I/O."""
