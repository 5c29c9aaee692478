"""Storage of uploaded files and batches, on disk or in Redis, and the execution of batches."""
