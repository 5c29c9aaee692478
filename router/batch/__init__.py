"""Batches and uploaded files on disk, and the execution of batches."""
