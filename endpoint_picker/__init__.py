"""Endpoint picker for the Gateway API Inference Extension: Envoy asks it where each request goes."""
