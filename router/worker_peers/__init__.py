"""Router processes behind one port (`--workers`): what one of them asks of the others, and answers them."""
