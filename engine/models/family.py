"""Family: what a model_type fixes beyond its config.json (defaults, layer structure, tensor names of experts)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stack:
    """Tensors that hold all experts of a layer: names after the layer's.

    inputs_first    they are [experts, inputs, outputs] instead of [experts, outputs, inputs]
    alternating     outputs of gate and up take turns, instead of lying one after the other
    shared_gate_up, shared_down     tensors of the MLP for all tokens, if its gate and up are one tensor, too"""

    gate_up: str
    down: str
    inputs_first: bool = False
    alternating: bool = False
    shared_gate_up: str = ""
    shared_down: str = ""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Tensor names of a layer's experts, and a family's routing rules.

    renormalised    see `Routing`, unless the config says
    sigmoid         scores are sigmoids of the logits instead of a softmax
    grouped         experts are in groups, each judged by its two best
    correction      name of the correction of scores; empty: there is none
    correction_row  it is [1, experts] in checkpoints
    on_inputs, mixer    see `Routing`: weights multiply inputs, each chosen expert has a softmax of its own
    precise         the router computes in float32
    biased          router and experts have biases
    clamped         their gate and up have a limit
    shared_gate     name of the gate of the MLP for all tokens; empty: there is none
    stack           see `engine.models.stacked`; None: each expert has tensors of its own

    All names follow the layer's, those of parts the expert's."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_experts"
    renormalised: bool = False
    sigmoid: bool = False
    grouped: bool = False
    correction: str = ""
    correction_row: bool = False
    on_inputs: bool = False
    mixer: bool = False
    precise: bool = False
    biased: bool = False
    clamped: bool = False
    shared_gate: str = ""
    stack: Stack | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """Fixed properties of a model family: defaults of omitted fields, and the structure of its layers.

    gguf            its GGUF files are supported, too
    gguf_permuted   q and k rows of those are reordered for interleaved rotation
    fused, fused_mlp    checkpoints store as one the tensors that we concatenate: qkv and gate_up, or gate_up alone
    interleaved     rotation pairs neighbours: rows of q and k are reordered when read
    windows_rotate  only layers with a window rotate
    else_all_rotate     where the config has no window, all layers do
    unrotated       no layer rotates, unless the config's position_embedding_type is rope
    partial         the rotated share of a head, unless the config says
    attention_bias  attention has biases, unless the config says
    o_bias          if attention has biases, its output projection has one, too
    names_behind    with output norms: names of those before the MLP, after attention and after the MLP
    windowed        a sliding window in the config is every layer's
    pattern         it is every layer's except each n-th, unless layer_types says; 0: the config says otherwise
    factors         its config has factors of embedding, attention, layers and logits
    embedding_root  embeddings are multiplied by the root of their size
    logit_scale     factor of logits, unless the config says
    norm_offset     added to the weights of norms
    centred         norms subtract the mean: layer norms
    norm_bias       layer norms have a bias, except those of q and k
    unweighted      layer norms have neither weights nor a bias
    eps             field of the config with the epsilon of norms, and its value where it is omitted
    parallel        attention and MLP read one norm, the first, and are added together
    parallel_option     the same where the config's use_parallel_residual says so
    norm_before, norm_behind   attention and MLP each have a norm before, after (before the residual is added)
    wide_qk_norm    the norms of q and k span all heads together
    own_qk_norm     each head has weights of its own in the norms of q and k
    qk_norm_option  field of the config that says whether there are norms of q and k, in place of qk_norm
    norms_rotated   q and k are normed after their rotation
    activation      MLPs have no gate, but this activation, unless the config says
    clipped         clip_qkv of the config bounds the results of q, k and v
    tempered        queries grow with their position: llama_4_scaling_beta of the rotary settings
    ntk_alpha       alpha of the rotary settings stretches their base
    layered         layer_types may take the window from layers of a family that is windowed
    biases          fields of the config that say whether q, k and v, the output, and the MLP have biases
    mlp_bias        the MLP has biases, unless the config says
    head_bias       the vocabulary projection has a bias
    head_bias_option    field of the config that says whether it has one, in place of head_bias
    gelu            the gate is GELU by tanh instead of SiLU
    capped          attention scores and logits have soft caps
    sinks           each head of attention has a sink, see `Ops.paged_attention`
    latent          attention is over a latent (`kernels.latent`)
    two_ropes       layers with a window rotate by parameters of their own
    shaped          layers differ in shape and may share K/V (`model_files.layer_shapes`)
    streams         several streams of hidden states run through the layers (`engine.models.altup`)
    logit_cap       soft cap of logits alone, unless the config says
    mlp             name of a layer's MLP
    chunked         layers attend in chunks and rotate, except each n-th; those that rotate norm q and k without
                    weights, those that do not have a temperature (Llama 4)
    gated           each head's output of attention is gated, see `Gqa`
    experts         tensor names of layers with experts; None: there are none
    """

    theta: float = 10000.0
    tie_embeddings: bool = False
    head_dim: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False
    gguf: bool = True
    gguf_permuted: bool = False
    fused: bool = False
    fused_mlp: bool = False
    interleaved: bool = False
    windows_rotate: bool = False
    else_all_rotate: bool = False
    unrotated: bool = False
    partial: float = 1.0
    attention_bias: bool = False
    o_bias: bool = True
    names_behind: tuple[str, str, str] = (
        "pre_feedforward_layernorm",
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    )
    windowed: bool = False
    pattern: int = 0
    factors: bool = False
    embedding_root: bool = False
    logit_scale: float = 1.0
    norm_offset: float = 0.0
    centred: bool = False
    norm_bias: bool = False
    unweighted: bool = False
    eps: tuple[str, float] = ("rms_norm_eps", 1e-6)
    parallel: bool = False
    parallel_option: bool = False
    norm_before: bool = True
    norm_behind: bool = False
    wide_qk_norm: bool = False
    own_qk_norm: bool = False
    qk_norm_option: str = "use_qk_norm"
    norms_rotated: bool = False
    activation: str = ""
    clipped: bool = False
    tempered: bool = False
    ntk_alpha: bool = False
    layered: bool = False
    biases: tuple[str, str, str] = ("attention_bias", "attention_bias", "mlp_bias")
    mlp_bias: bool = False
    head_bias: bool = False
    head_bias_option: str = ""
    gelu: bool = False
    capped: bool = False
    sinks: bool = False
    latent: bool = False
    two_ropes: bool = False
    shaped: bool = False
    streams: bool = False
    logit_cap: float = 0.0
    mlp: str = "mlp"
    chunked: bool = False
    gated: bool = False
    experts: ExpertNames | None = None

    @property
    def plain(self) -> bool:
        """Return whether layers are those of Llama: one RMS norm before each part, one rotation, no caps.

        Attention may have gates. MLPs have a SiLU gate, or none. Some backends compute such decoders by themselves."""
        norms = (self.norm_behind, self.wide_qk_norm, self.norms_rotated, self.centred)
        attention = (self.capped, self.sinks, self.latent, self.two_ropes)
        return not any((*norms, *attention, self.gelu, self.parallel))

    @property
    def stack(self) -> Stack | None:
        """Return how checkpoints hold all experts of a layer in one tensor; None: they do not."""
        return None if self.experts is None else self.experts.stack
