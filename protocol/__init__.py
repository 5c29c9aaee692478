"""What all processes of a cluster agree on: messages, sampling, block hashes, layout, errors, settings, metrics."""
