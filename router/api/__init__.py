"""The OpenAI API over HTTP: one file per shape, and what they share."""
