"""Dashboard, and the cluster state behind it, which `kvferry top` also shows."""
