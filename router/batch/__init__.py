"""Batches and files of clients on disk, and their execution."""
