"""Dashboard of the router: cluster state as JSON, which `kvferry top` also shows, and as an HTML page."""
