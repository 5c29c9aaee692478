"""Placement: pure functions that choose the nodes of a request from the nodes' reported state; costs are in seconds.

The package does no I/O."""
