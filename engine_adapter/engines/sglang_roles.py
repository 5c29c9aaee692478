"""Change of an SGLang server's role between prefill and decode (`--enable-pd-role-switch`).

The server changes only while it is idle, forgets its prefix cache then, and keeps its process. Asked for the role that
it has, it changes nothing, but refuses as it would refuse a change: that is how its ability is checked."""

from __future__ import annotations

from typing import Any

from kvferry.engine_adapter.http_client import EngineHttp
from kvferry.protocol.errors import InvalidRequest, Overloaded, StepFailed

PATH = "/pd_role_switch"
SWITCH_S = 180.0
"""Maximum time without an answer to a change, in seconds: a new decode server first captures its CUDA graphs."""
BUSY = "not idle"
"""Text of a refusal that lasts until the server's requests end."""


def current_mode(reported: dict[str, Any]) -> str:
    """Return the server's `disaggregation_mode` of this moment, from /server_info; null if its ranks differ.

    The arguments at the top of the answer are those of its start; its ranks report the current ones."""
    states = [each for each in reported.get("internal_states") or () if isinstance(each, dict)]
    modes = {str(each["disaggregation_mode"]) for each in states if each.get("disaggregation_mode")}
    if len(modes) > 1:
        return "null"
    return modes.pop() if modes else str(reported.get("disaggregation_mode") or "null")


async def switch_role(http: EngineHttp, role: str, graphs_gb: float) -> None:
    """Make the server a prefill or decode server; see `engine.ElasticEngine.switch_role`."""
    body: dict[str, Any] = {"new_role": role}
    if graphs_gb:
        body["decode_cuda_graph_memory_gb"] = graphs_gb
    try:
        reported = await http.post(PATH, body, SWITCH_S)
    except InvalidRequest as error:
        if BUSY in error.message:
            raise Overloaded(error.message, retry_after=1.0) from error
        raise
    if not isinstance(reported, dict) or reported.get("success") is not True or reported.get("new_role") != role:
        raise StepFailed(f"the engine answered a change of its role with {str(reported)[:500]}")
