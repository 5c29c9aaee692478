"""Journals of requests: their outputs so far, from which this router or another one continues after a break."""
