"""`calibrated`: sets the simulated hardware model (Machine) from the leases of a running cluster's nodes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from kvferry.cluster_state.redis_store import RedisStore
from kvferry.placement.types import STREAM_SHARE
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.lease import NodeLease, Rates
from kvferry.simulate.choices import check_known
from kvferry.simulate.machine import Machine


async def leases_of(redis_url: str, cluster: str = "default", model: str = "") -> list[NodeLease]:
    """Return the leases of the cluster's ready nodes of that model.

    Raises ConfigError if no node is ready, or if no model is named and there are several; raises RegistryUnavailable.
    """
    store = RedisStore(redis_url, cluster)
    try:
        leases = [lease for lease in await store.nodes() if lease.state == "ready"]
    finally:
        await store.close()
    if not leases:
        raise ConfigError(f"no node of cluster {cluster} is ready there", param="calibrate")
    return of_model(leases, model)


def of_model(leases: Sequence[NodeLease], model: str) -> list[NodeLease]:
    """Return the leases of one model, because rates of several must not be mixed.

    Raises ConfigError."""
    names = sorted({lease.model for lease in leases})
    if not model and len(names) > 1:
        raise ConfigError(f"the nodes there serve several models, choose one: {', '.join(names)}", param="model")
    if model:
        check_known("model", model, names)
    return [lease for lease in leases if lease.model == (model or names[0])]


def calibrated(leases: Sequence[NodeLease], machine: Machine) -> Machine:
    """Return `machine` with the rates of the leases. Raises ConfigError without a ready decode node.

    Rates are medians over the nodes; prefill rates, over the nodes that prefill. The part of a step per stream is the
    share that placement assumes (STREAM_SHARE)."""
    decodes = [lease for lease in leases if lease.role == "decode"]
    prefills = [lease for lease in leases if lease.role == "prefill"] or decodes
    if not decodes:
        raise ConfigError("no decode node is ready", param="calibrate")
    first = decodes[0]
    streams = max(1.0, _median(lease.load.running_requests for lease in decodes))
    alone_s = _median(lease.rates.step_s for lease in decodes) / (1 + STREAM_SHARE * (streams - 1))
    return replace(
        machine,
        prefill_tokens_per_s=_median(lease.rates.prefill_tokens_per_s for lease in prefills),
        step_s=alone_s * (1 - STREAM_SHARE),
        stream_s=alone_s * STREAM_SHARE,
        ship_bytes_per_s=_median(lease.rates.ship_bytes_per_s for lease in prefills),
        block_size=first.block_size,
        block_bytes=first.block_bytes,
        blocks=max(1, int(_median(lease.load.total_blocks for lease in (*decodes, *prefills)))),
        page_blocks=first.state_blocks if first.window_pages else 0,
        window_pages=first.window_pages,
        max_num_seqs=first.max_num_seqs or machine.max_num_seqs,
        host_block_s=_read_s(prefills, lambda rates: rates.host_block_s) or machine.host_block_s,
        disk_block_s=_read_s(prefills, lambda rates: rates.disk_block_s) or machine.disk_block_s,
        media_tokens_per_s=_encode_rate(leases) or machine.media_tokens_per_s,
    )


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _read_s(leases: Sequence[NodeLease], block_s: Callable[[Rates], float]) -> float:
    """Return the median seconds to read a block, over the nodes that have this tier; 0 if none has."""
    return _median([each for lease in leases if (each := block_s(lease.rates))] or [0.0])


def _encode_rate(leases: Sequence[NodeLease]) -> float:
    """Return the median rate of nodes that have encoded, of encode nodes if one has; 0 if none has."""
    known = [lease for lease in leases if lease.rates.media_tokens_per_s]
    encoders = [lease for lease in known if lease.role == "encode"] or known
    return _median([lease.rates.media_tokens_per_s for lease in encoders] or [0.0])
