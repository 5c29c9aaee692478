"""Router process: OpenAI API, tokenization, placement and dispatch of requests."""
