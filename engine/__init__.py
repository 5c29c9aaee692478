"""Inference engine of one model on one device: block pool, scheduler, runner, sampler and models.

It knows no sockets and no Redis."""
