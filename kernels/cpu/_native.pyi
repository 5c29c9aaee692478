"""The compiled extension (native/module.cpp). Tensors are on the CPU; ValueError where shapes, dtypes or layouts do not
fit. Calls release the GIL; one call at a time per Kernels."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

def instruction_sets() -> list[str]: ...
def row_bytes(kind: str, inputs: int) -> int:
    """Bytes of a stored row of that kind (see kernels.decoder_spec.StoredRows); -1 where it is not packed."""

Place = tuple[int, int, int, list[tuple[int, int]]]
"""Inputs, outputs, where the bias lies (-1: there is none), and of each panel its form and where it lies."""

class Packed:
    """A weight [out, in] and its bias, as panels (native/forms.h)."""

class Kernels:
    """Kernels of one instruction set and the threads that run them."""

    def __init__(self, instruction_set: str, threads: int) -> None: ...
    @property
    def instruction_set(self) -> str: ...
    @property
    def threads(self) -> int: ...
    def rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, total: Tensor | None, eps: float
    ) -> None: ...
    def gate_mul(self, gate_up: Tensor, out: Tensor, slope: float, cubic: float, limit: float, offset: float) -> None:
        """The constants are those of kernels.gate_spec.Gate."""
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, eps: float) -> None: ...
    def activate(
        self, x: Tensor, out: Tensor, which: int, positive: float, negative: float, beta: float, bound: float
    ) -> None:
        """The index in kernels.activation.KINDS, and the constants of kernels.activation.Activation."""
    def rope_and_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        kv: Tensor,
        positions: Tensor,
        slots: Tensor,
        out: Tensor,
    ) -> None: ...
    def decode(
        self,
        q: Tensor,
        kv: Tensor,
        block_table: Tensor,
        total_len: Tensor,
        rows: int,
        scale: float,
        window: int,
        cap: float,
        sinks: Tensor | None,
        blocks: bool,
        out: Tensor,
    ) -> None:
        """blocks: in the arithmetic of `prefill` (bfloat16, dims multiples of 32)."""
    def prefill(
        self,
        q: Tensor,
        kv: Tensor,
        blocks: Tensor,
        total_len: int,
        scale: float,
        window: int,
        cap: float,
        sinks: Tensor | None,
        see_until: Tensor | None,
        out: Tensor,
    ) -> None:
        """Of a cache of one plane V are the last dims of each vector, as many as `out` has."""
    def expanded(
        self,
        expand: Packed,
        q: Tensor,
        kv: Tensor,
        blocks: Tensor,
        total_len: int,
        scale: float,
        span: int,
        bytes: int,
        out: Tensor,
    ) -> None:
        """Latent attention of one sequence's query tokens in the expanded form (kernels.latent). span: of so many
        positions K and V are held at a time, for as many heads as take up to `bytes`, one at least."""
    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        states: Tensor,
        lens: list[int],
        before: Tensor,
        after: Tensor,
        silu: bool,
        gated: bool,
        out: Tensor,
    ) -> None:
        """As kernels.recurrent_ops.RecurrentOps, gated: as its gated_conv. lens: query tokens of each sequence; before,
        after: its rows of the states."""
    def delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor,
        states: Tensor,
        lens: list[int],
        before: Tensor,
        after: Tensor,
        by_token: bool,
        out: Tensor,
    ) -> None: ...
    def state_space(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        states: Tensor,
        lens: list[int],
        before: Tensor,
        after: Tensor,
        by_token: bool,
        out: Tensor,
    ) -> None: ...
    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, norm_first: bool, out: Tensor
    ) -> None: ...
    def sigmoid_mul(self, x: Tensor, gate: Tensor, out: Tensor) -> None: ...
    def time_steps(self, x: Tensor, bias: Tensor, low: float, high: float, out: Tensor) -> None: ...
    def delta_gates(self, rates: Tensor, rate: Tensor, bias: Tensor, decay: Tensor, beta: Tensor) -> None: ...
    def pack(self, parts: list[tuple[str, Tensor]], inputs: int, bias: Tensor | None) -> Packed: ...
    def pack_into(self, descriptor: int) -> None:
        """What is packed from now on lies in this empty file; -1: in memory of this process. MemoryError where `pack`
        finds no room."""
    def finish(self) -> int:
        """End the file behind what was packed, and return its bytes."""
    def map(self, descriptor: int, size: int) -> None:
        """The first `size` bytes of a finished file, to be read, for `placed`. MemoryError."""
    @staticmethod
    def place(packed: Packed) -> Place:
        """Where it lies in its file. IndexError: it lies in none."""
    def placed(self, place: Place) -> Packed:
        """IndexError, ValueError: the file that is mapped has no such weight."""
    def lookup(self, packed: Packed, rows: Tensor, out: Tensor) -> None: ...
    def dense(self, packed: Packed, x: Tensor, out: Tensor) -> None: ...
    def dense_of_heads(self, packed: Packed, x: Tensor, out: Tensor) -> None:
        """A layer of each head: x [n, heads, inputs], out [n, heads, outputs]. packed: one behind the other, each
        padded to whole panels."""
    def draw(
        self,
        logits: Tensor,
        how: list[tuple[float, float, int, float, int]],
        masks: Sequence[np.ndarray | None],
        out: Tensor,
    ) -> None:
        """how: of each row temperature (0: the most likely), min_p, top_k (the vocabulary's size: off), top_p and the
        key of its noise. masks: int32 [words] of each row, None where it has none; or empty. out: -1 for a row with a
        NaN or whose largest logit is no finite number."""
    def read(self, data: Tensor) -> None:
        """Read the tensor once with all threads: the machine's memory limit."""
    def multiply(self, rounds: int) -> int:
        """Multiply in registers with all threads; the number of floating point operations done."""

class Mixer:
    """A recurrent mixer of a recorded step (kernels.mixer_spec).

    state: numbers of a row of the states before its own."""

    @staticmethod
    def short_conv(inputs: Packed, conv: Tensor, bias: Tensor | None, out: Packed, state: int) -> Mixer: ...
    @staticmethod
    def delta(
        inputs: Packed,
        rates: Packed,
        conv: Tensor,
        decay: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
        out: Packed,
        k_heads: int,
        v_heads: int,
        k_dim: int,
        v_dim: int,
        eps: float,
        state: int,
    ) -> Mixer: ...
    @staticmethod
    def scan(
        inputs: Packed,
        conv: Tensor,
        bias: Tensor | None,
        decay: Tensor,
        skip: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
        out: Packed,
        heads: int,
        dim: int,
        groups: int,
        numbers: int,
        norm_first: bool,
        low: float,
        high: float,
        eps: float,
        state: int,
    ) -> Mixer: ...

class Step:
    """A decoder recorded for decodes and chunks of prompts: `max_rows` tokens, of them `max_decodes` decodes."""

    def __init__(
        self,
        kernels: Kernels,
        embedding: Packed,
        head: Packed,
        norm: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        scale: float,
        batch_invariant: bool,
        gated: bool,
        factors: tuple[float, float],
        max_rows: int,
        max_decodes: int,
    ) -> None: ...
    def add_layer(
        self,
        input_norm: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        post_norm: Tensor,
        qkv: Packed,
        o: Packed,
        gate_up: Packed,
        down: Packed,
        rotated: bool,
        window: int,
        activation: tuple[int, float, float, float, float],
        factors: tuple[float, float],
    ) -> None:
        """The activation is that of `activate`; gate_up holds no gate then. -1: a SiLU gate. factors: of
        the results of o and of down."""
    def add_mixer(
        self,
        input_norm: Tensor,
        post_norm: Tensor,
        mixer: Mixer,
        gate_up: Packed,
        down: Packed,
        activation: tuple[int, float, float, float, float],
        factors: tuple[float, float],
    ) -> None:
        """A layer with a recurrent mixer in place of attention."""
    def bind(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        block_table: Tensor,
        query_start: Tensor,
        total_len: Tensor,
        decodes: int,
        chained: bool,
        kv: Tensor,
        out: Tensor,
    ) -> None:
        """The batch of the runs that follow, whose arrays may be changed between them where all are decodes, and where
        they write: hidden states, or logits where `out` is float32."""
    def bind_states(self, states: Tensor, before: Tensor, after: Tensor) -> None:
        """The rows of states that the batch's sequences read and write, which may be changed between runs."""
    def run(self, first: int, last: int) -> list[int]:
        """Layers [first, last), the next ones of the batch. Where the largest of each row's logits lies, -1 for a row
        with a NaN or where it is no finite number."""
    def residual(self, out: Tensor) -> None:
        """out [T, hidden] = what the next layer adds to."""
