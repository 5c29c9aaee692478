"""What tests write GGUF files with: the names of a checkpoint's tensors there, and the end of a file."""

from __future__ import annotations

from collections.abc import Mapping

from gguf import GGUFWriter

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
"""Of modules, a layer's without its number."""


def gguf_name(name: str, own: Mapping[str, str] | None = None) -> str:
    """A tensor's name in a GGUF. own: of modules that others lack, or call otherwise. Raises KeyError for those that
    have no name."""
    names = {**NAMES, **(own or {})}
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{names[stem]}.{kind}"
    layer, module = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{names[module]}.{kind}"


def finish(writer: GGUFWriter) -> None:
    """Write the file that was put together."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
