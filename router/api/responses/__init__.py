"""OpenAI's Responses API, with stored, background and resumable responses."""
