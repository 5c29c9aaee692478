"""Text processing: tokenizers, chat templates, stop strings and output parsers."""
