"""The router's view of the nodes, and its connections to them."""
