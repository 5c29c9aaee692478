"""Text to tokens and back: tokenizers, chat templates, stop strings."""
