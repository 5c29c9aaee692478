"""Endpoint picker for the Gateway API Inference Extension: chooses the engine of each request for Envoy."""
