"""Pooling endpoints, which return vectors or scores instead of text: embeddings, scores, reranking, classification."""
