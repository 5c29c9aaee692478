"""Tensor parallelism: several processes of a machine compute one model, each with a shard of every layer and block."""
