"""Builds the error for a prompt and an output that together exceed the model's context length."""

from __future__ import annotations

from kvferry.protocol.errors import ContextLengthExceeded


def context_exceeded(prompt: int, output: int, limit: int, param: str) -> ContextLengthExceeded:
    """Return the error for a prompt of `prompt` tokens and an output of `output` tokens."""
    error = ContextLengthExceeded(
        f"this model's maximum context length is {limit} tokens, but the request needs {prompt + output} "
        f"({prompt} in the prompt, {output} for the output); shorten the prompt or ask for fewer tokens",
        param=param,
    )
    error.counted = prompt, output, limit
    return error
