"""Transfer of KV blocks between nodes: the UCX link, senders, receivers and storage tiers."""
