"""Structured output: grammars as text, their validation, and matchers that say which tokens may come next."""
