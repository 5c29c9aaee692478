"""Chat page at `/`, where a person can talk to the model."""
