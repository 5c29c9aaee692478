"""Files that clients keep here, and batches: many requests in a file, answered when there is room."""
