"""vLLM's HTTP API of token ids on a decode node, so that other projects' routers can use it as an engine."""
