"""Pooling endpoints: embeddings, scores, reranking and classification."""
