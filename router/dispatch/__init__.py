"""Dispatch of a request from placement to its last token, with retries, hedging and migration."""
