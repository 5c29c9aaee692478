"""Protocols of the engines that an adapter knows."""
