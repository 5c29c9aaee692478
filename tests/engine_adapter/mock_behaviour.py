"""How the mock of vLLM behaves."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Behaviour:
    """How the mock behaves.

    fault: "" or what befalls each new request: error_event (an error behind status 200, the engine stays well),
    dead_core (the same, and /health answers 503), hang (no token), refuse (503), dies_behind_prefill (when the answer
    with a reference is out), dies_on_fetch. loose: greedy tokens depend on the
    requests that run beside. prefill_s: seconds per prompt token that is computed. transfer: it has a NixlConnector;
    kv_lease and corrupt: see MockTransfer. modalities: media that it takes. hears: it transcribes. blind: its token
    interface does not see media. pools: what `/pooling` does, embed or classify; empty: the server generates.
    pooling_fault: see MockPooling."""

    step_s: float = 0.0
    noise: str = "position"
    fault: str = ""
    fault_at: int = 3
    loose: bool = False
    details: bool = True
    events: bool = True
    model: str = "/models/toy"
    version: str = "0.32.0"
    block_size: int = 16
    blocks: int = 4096
    max_model_len: int = 4096
    loras: tuple[str, ...] = ()
    prefill_s: float = 0.0
    transfer: bool = False
    kv_lease: float = 30.0
    corrupt: str = ""
    modalities: tuple[str, ...] = ()
    hears: bool = False
    blind: bool = False
    pools: str = ""
    pooling_fault: str = ""
