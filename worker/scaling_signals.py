"""Scaling signals of a node, for autoscalers and the lease: prefill backlog in seconds, and decode pressure in nodes.

Both can be summed over nodes, are zero when the node is idle and change gradually, because autoscalers act on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.protocol.lease import Load
from kvferry.protocol.scaling_metrics import NodeScaling
from kvferry.protocol.settings import WorkerSettings

if TYPE_CHECKING:  # it loads torch, and adapters use the formulas
    from kvferry.worker.rates import RateMeter

WAIT_S = 30.0
"""Waiting time of the next request, in seconds, from which on each waiting request counts as a full stream.

Before that, streams may still end, and waiting requests count in part."""
SLOWER = 1.25
"""Factor on the latency of a lone stream that replaces a target which even a lone stream misses.

More nodes would not help in that case."""


def prefill_backlog_s(load: Load, tokens_per_s: float) -> float:
    """Return the time to compute the node's waiting prompts at this rate, in seconds."""
    return load.waiting_tokens / max(1.0, tokens_per_s)


def latency_share(itl_s: float, alone_s: float, target_s: float) -> float:
    """Return the share of the latency target that streams use: 0 if each runs as if alone, 1 at the target.

    Each stream adds about the same to a step's time, so the share grows evenly with the number of streams."""
    target_s = max(target_s, SLOWER * alone_s)
    return max(0.0, (itl_s - alone_s) / max(target_s - alone_s, 1e-6))


def decode_pressure(load: Load, seats: int, latency: float, waits_s: float) -> float:
    """Return how many decode nodes the node's streams and waiting requests would fill.

    seats: maximum number of concurrent streams. latency: see `latency_share`; it counts for at most one node per
    stream. waits_s: seconds for which the next request has waited for a stream to end."""
    wanted = load.running_requests + load.open_grants + load.waiting_requests
    taken = min(wanted, max(seats, wanted - load.waiting_requests))
    held = (load.active_blocks + load.granted_blocks) / max(1, load.total_blocks)
    slow = min(latency, float(load.running_requests))
    queued = (wanted - taken) / max(1, seats) * min(1.0, waits_s / WAIT_S)
    return max(taken / max(1, seats), held if taken else 0.0, slow) + queued


def pressure_now(role: str, settings: WorkerSettings, load: Load, meter: RateMeter, waits_s: float) -> float:
    """Return the node's contribution to the decode pressure of its model; 0 for a prefill node.

    waits_s: seconds for which the next request has waited for a stream to end or for blocks."""
    if role != "decode":
        return 0.0
    latency = latency_share(meter.itl_s, meter.alone_s, settings.itl_target_ms / 1000)
    return decode_pressure(load, settings.max_num_seqs, latency, waits_s)


def set_scaling_gauges(
    gauges: NodeScaling, role: str, settings: WorkerSettings, load: Load, meter: RateMeter, waits_s: float
) -> None:
    """Set the scaling gauges to current values."""
    rate, target_s = meter.rates.prefill_tokens_per_s, settings.itl_target_ms / 1000
    gauges.prefill_rate.set(rate)
    gauges.prefill_backlog.set(prefill_backlog_s(load, rate))
    gauges.admission_wait.set(waits_s)
    if role == "decode":
        gauges.decode_pressure.set(pressure_now(role, settings, load, meter, waits_s))
        gauges.itl_ratio.set(meter.itl_s / max(target_s, 1e-3) if load.running_requests else 0.0)
