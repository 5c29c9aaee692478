"""Pool usage that a node's own work would need, for autoscaling.

Both are in units that may be summed over nodes: seconds of a node's time, and nodes. They are zero when it is idle, and
none of them jumps: autoscalers act on them.
"""

from __future__ import annotations

from kvferry.protocol.lease import Load
from kvferry.protocol.scaling_metrics import NodeScaling
from kvferry.protocol.settings import WorkerSettings
from kvferry.worker.rates import RateMeter

WAIT_S = 30.0
"""Once the next one has waited so long for a seat, each that waits is worth one: before, seats still come free."""
SLOWER = 1.25
"""A target that a stream misses even alone is taken for so many times what it takes then: more nodes would not help."""


def prefill_backlog_s(load: Load, tokens_per_s: float) -> float:
    """Seconds until the prompts here are computed, at that rate."""
    return load.waiting_tokens / max(1.0, tokens_per_s)


def latency_share(itl_s: float, alone_s: float, target_s: float) -> float:
    """Return the share of the latency target that streams use: 0 where each runs as if alone, 1 at the target.

    A step grows by about the same with each stream, and so does this."""
    target_s = max(target_s, SLOWER * alone_s)
    return max(0.0, (itl_s - alone_s) / max(target_s - alone_s, 1e-6))


def decode_pressure(load: Load, seats: int, latency: float, waits_s: float) -> float:
    """Nodes that the streams here would fill, and those for what waits here.

    latency: see `latency_share`, of no more nodes than there are streams; waits_s: of the next one, for a seat."""
    wanted = load.running_requests + load.open_grants + load.waiting_requests
    taken = min(wanted, max(seats, wanted - load.waiting_requests))
    held = (load.active_blocks + load.granted_blocks) / max(1, load.total_blocks)
    slow = min(latency, float(load.running_requests))
    queued = (wanted - taken) / max(1, seats) * min(1.0, waits_s / WAIT_S)
    return max(taken / max(1, seats), held if taken else 0.0, slow) + queued


def pressure_now(role: str, settings: WorkerSettings, load: Load, meter: RateMeter, waits_s: float) -> float:
    """Return the node's contribution to the pressure of its model's decode nodes.

    waits_s: of the request that is next, for a seat or blocks."""
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
