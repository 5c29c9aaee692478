"""Journals of requests, from which this router or another one goes on after a break."""
