"""What an output must match: grammars as text, and matchers that say which tokens may come next."""
