"""Inference engine of one model on one device: block pool, scheduler, runner, sampler and models.

It has no sockets and no Redis."""
