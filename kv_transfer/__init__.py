"""Transfer of KV blocks between nodes: UCX link, senders, receivers and fetches; tiers store blocks elsewhere."""
