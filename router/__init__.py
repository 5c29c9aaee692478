"""The router process: OpenAI API, text to tokens and back, placement, the journey of one request."""
