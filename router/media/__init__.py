"""Images, audio and video in requests: validation, fetching, and the prompt that an engine makes of them."""
