"""OpenAI-compatible HTTP API, one package per endpoint family."""
