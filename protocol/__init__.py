"""Shared definitions of all processes: messages, sampling, block hashes, layout, errors, settings and metrics."""
