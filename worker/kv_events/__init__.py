"""KV events of a node over ZeroMQ, in vLLM's form."""
