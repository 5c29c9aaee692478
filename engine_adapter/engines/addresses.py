"""Conversion of an address that an engine bound, such as tcp://*:5557, into one to connect to."""

from __future__ import annotations


def reachable(endpoint: str, host: str) -> str:
    """Return the address to connect to for an endpoint that the engine bound to all addresses."""
    for wildcard in ("*", "0.0.0.0", "[::]"):  # noqa: S104 - binds nothing
        endpoint = endpoint.replace(f"tcp://{wildcard}:", f"tcp://{host}:")
    return endpoint
