"""Moving and finding KV blocks: the UCX link, sender, receiver, ledger, block index and node registry."""
