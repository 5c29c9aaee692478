"""State of the cluster in Redis: the node registry, the block index and the stores behind them.

It imports neither models nor links."""
