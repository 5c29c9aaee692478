"""Tenants: API keys, rate limits, and the fair queue in which their requests wait for a slot."""
