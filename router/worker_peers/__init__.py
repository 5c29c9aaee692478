"""Communication between the router processes that share one port (`--workers`), and their merged metrics."""
