"""Endpoints that read prompts and generate nothing: embeddings, scores, ranks, labels."""
