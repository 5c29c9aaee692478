"""Dispatch of a request to nodes, from placement to its last token, with retries, hedging and migration."""
