"""Thousands of nodes on a virtual clock, over the real placement, registry and index. No sockets, no torch."""
