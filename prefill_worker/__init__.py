"""Prefill worker: computes prompts and ships their KV blocks."""
