"""What all processes of a cluster agree on: messages, sampling parameters, hashes, layout, errors, settings, metrics."""
