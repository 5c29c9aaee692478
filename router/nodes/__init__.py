"""The router's view of nodes, and its connections to them."""
