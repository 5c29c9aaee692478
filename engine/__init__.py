"""Inference engine of one model on one device: block pool, scheduler, runner, sampler, LoRA, media and models.

It has no sockets and no Redis."""
