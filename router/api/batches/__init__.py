"""Routes of the Files and Batch APIs."""
