"""Text processing of the router: tokenizers, chat templates, stop strings, and parsers of model output."""
