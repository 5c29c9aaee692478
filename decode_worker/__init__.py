"""Decode role of a node: grants and receives KV blocks, generates and streams tokens, replicates and moves streams."""
