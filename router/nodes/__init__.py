"""Router's view of the nodes: table, load, health, and HTTP connections to them."""
