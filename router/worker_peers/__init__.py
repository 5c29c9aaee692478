"""Communication between the router processes that share one port (`--workers`)."""
