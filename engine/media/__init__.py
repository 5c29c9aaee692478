"""Images and audio in prompts: their encoders, and the embeddings that take the place of their placeholder tokens."""
