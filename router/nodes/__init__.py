"""Router's table of nodes, their health and load, and its HTTP connections to them."""
