"""Anthropic's Messages API: what it takes, how it answers, and how it tells of errors."""
