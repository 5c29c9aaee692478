"""One model on one device: block pool, scheduler, runner, sampler, models. Knows no sockets and no Redis."""
