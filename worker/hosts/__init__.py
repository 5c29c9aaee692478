"""Ranks of one node on several hosts: the hosts join host 0, watch each other and exchange parts of blocks."""
