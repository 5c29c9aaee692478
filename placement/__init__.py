"""Placement: pure functions that choose nodes for an attempt by their reported state, in seconds, without I/O."""
