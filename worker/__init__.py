"""Shared parts of prefill, decode and encode nodes: engine, link, lease and HTTP server, built from settings."""
