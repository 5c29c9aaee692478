"""Structured output: grammars as text, and matchers that tell which tokens may come next."""
