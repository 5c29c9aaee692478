"""Anthropic's Messages API: body, translation into a chat, answers and errors."""
