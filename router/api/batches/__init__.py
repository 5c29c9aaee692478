"""Clients' files and the batches over them, as routes."""
