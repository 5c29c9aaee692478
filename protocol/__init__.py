"""Definitions that all processes share: wire messages, sampling, block hashes, layout, errors, settings, metrics."""
