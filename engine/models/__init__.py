"""Decoder models and their weights."""
