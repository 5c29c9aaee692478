"""Journals of requests: recorded outputs, from which this router or another one continues after a break."""
