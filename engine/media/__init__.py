"""Media of prompts: their encoders, and the rows that take the place of their placeholder tokens."""
