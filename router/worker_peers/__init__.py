"""Communication between router processes behind one port (`--workers`)."""
