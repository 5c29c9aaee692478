"""What Redis holds: the node registry, the block index, and the stores behind them. Knows no models and no links."""
