"""Tenants: API keys, limits, and the fair queue in which their requests wait for a slot."""
