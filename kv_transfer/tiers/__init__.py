"""Storage tiers of KV blocks outside the pool: host memory, disk and a shared object store."""
