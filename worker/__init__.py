"""Shared runtime of prefill and decode processes: engine, link, lease and HTTP as one node."""
