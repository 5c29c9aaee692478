"""What requests bring: how bodies are read, the groups of their fields, and what these ask of a model."""
