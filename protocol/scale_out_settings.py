"""Settings of a decode node that serves vLLM's token API, KV events and metric names to other routers."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.setting import setting
from kvferry.protocol.speech_settings import SpeechSettings


@dataclass(frozen=True, kw_only=True)
class ScaleOutSettings(SpeechSettings):
    """Settings of vLLM's API of token ids, KV events and metric names on a node with kvferry's own engine."""

    enable_scale_out: bool = setting(
        False, "let a decode node serve POST /inference/v1/generate, vLLM's API of token ids, to other routers"
    )
    scale_out_api_key: str = setting(
        "",
        "API key of that API, sent as a bearer token in place of the cluster secret; pass it by the environment "
        "variable, which other users cannot see",
    )
    scale_out_timeout: float = setting(600.0, "seconds that a request of that API may take at most", min=0.001)
    kv_events_config: str = setting(
        "",
        "KV events over ZeroMQ in vLLM's form, as a JSON object: enable_kv_cache_events, publisher, endpoint, "
        "replay_endpoint, buffer_steps, topic. Anyone who can read them can read clients' prompts",
    )
    vllm_metrics: bool = setting(False, "add metrics under vLLM's names to /metrics of a decode node")
