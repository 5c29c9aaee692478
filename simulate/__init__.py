"""Cluster simulator on a virtual clock, with the real placement, registry and block index.

It uses no sockets and no torch."""
