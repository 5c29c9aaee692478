"""Prefill role of a node: computes prompts and sends their KV blocks to decode nodes."""
