"""The prefill process: computes prompts and ships their KV blocks."""
