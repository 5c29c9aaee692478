"""State of the cluster in Redis: node registry, block index and stored responses.

The package does not depend on models or links."""
