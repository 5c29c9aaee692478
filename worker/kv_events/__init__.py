"""KV events of a node over ZeroMQ, in vLLM's format, for other projects' cache-aware routers."""
