"""A request from its placement to its last token, whatever fails on the way."""
