"""Images, audio and video in requests: validation, fetching, and the prompt that a node's engine makes of them."""
