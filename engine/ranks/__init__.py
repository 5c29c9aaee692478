"""Tensor parallelism: several processes compute one model, each with a shard of every layer and block."""
