"""Encode worker: turns images and audio of prompts into rows, which prefill workers fetch as blocks."""
