"""State shared by the cluster's processes in Redis: nodes, block index, journals, router leases, files and responses.

The package does not depend on models or links."""
