"""OpenAI's Responses API: what it takes, how it answers, and the responses that are kept."""
