"""OpenAI-compatible HTTP API of the router, and those of Anthropic and llama.cpp; one package per endpoint family."""
