"""Cluster simulator on a virtual clock: the real placement, registry and block index, with modelled nodes.

It uses no sockets and no torch."""
