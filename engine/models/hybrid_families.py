"""Table of model families with recurrent layers: where each departs from the defaults of Family.

`model_files.hybrid` says which layers are recurrent."""

from __future__ import annotations

from dataclasses import replace

from kvferry.engine.models.family import ExpertNames, Family, Stack
from kvferry.engine.models.moe_families import CORRECTED, GRANITE, MIXTRAL

_LFM2 = Family(theta=1000000.0, qk_norm=True)
_QWEN = Family(head_dim=256, qk_norm=True, partial=0.25, norm_offset=1.0, gated=True)
_SHARED = ExpertNames(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate", renormalised=True)

HYBRIDS = {
    "lfm2": _LFM2,
    "lfm2_moe": replace(
        _LFM2,
        experts=ExpertNames(
            gate="w1", up="w3", down="w2", renormalised=True, sigmoid=True, correction="mlp.expert_bias"
        ),
    ),
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": replace(
        _QWEN, experts=replace(_SHARED, stack=Stack("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))
    ),
    "qwen3_next": replace(_QWEN, experts=_SHARED),
    "granitemoehybrid": Family(gguf_permuted=True, mlp="shared_mlp", factors=True, unrotated=True, experts=GRANITE),
    "bamba": Family(gguf=False),
    "falcon_h1": Family(factors=True),
    "jamba": Family(unrotated=True, experts=ExpertNames(router="mlp.router")),
    "nemotron_h": Family(unrotated=True, activation="relu2", experts=CORRECTED),
    "minimax": Family(gguf=False, theta=1000000.0, experts=MIXTRAL),
}
