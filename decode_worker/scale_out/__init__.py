"""Decode node as an engine of other projects' routers: vLLM's API of token ids."""
