"""Encode role of a node: computes embeddings of images and audio, which prefill and decode nodes fetch as blocks."""
