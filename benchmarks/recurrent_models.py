"""Writes GGUF files of recurrent models with random weights in Q8_0, which kvferry and llama.cpp both read.

`recurrent_shapes` has their sizes; the demo model lends its tokens, followed by names that no text has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.recurrent_shapes import SHAPES, Shape, tensors
from kvferry.model_files.gguf import GGUFFile, read_gguf
from kvferry.model_files.source import DEMO_MODEL, resolve

if TYPE_CHECKING:
    import gguf
    import numpy as np

SPREAD = 0.02
"""Standard deviation of the weights, as models are initialised."""
BLOCK, BLOCK_BYTES = 32, 34
"""Numbers of a Q8_0 block, and its bytes: a float16 scale, then a code of eight bits each."""
CONTEXT = 32768
"""Maximum sequence length that the headers promise, in tokens."""
EPS = 1e-5
"""Added to the mean of squares in norms."""


def random_model(name: str, folder: Path) -> Path:
    """Return the file of a shape, made anew if it is missing."""
    target = folder / f"random-{name}.Q8_0.gguf"
    if target.exists():
        return target
    import gguf
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    unfinished, shape, source = target.with_suffix(".unfinished"), SHAPES[name], np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(unfinished), shape.architecture, use_temp_file=True)
    _add_header(writer, shape)
    demo = read_gguf(resolve(DEMO_MODEL, weights=False).path)
    unused = range(len(demo.metadata["tokenizer.ggml.tokens"]), shape.vocabulary)
    add_tokens(writer, demo, (f"[{index}]" for index in unused), gguf.TokenType.NORMAL)
    for tensor, sizes in tensors(shape):
        if _quantised(tensor, sizes):
            writer.add_tensor(tensor, _codes(source, sizes), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(tensor, _numbers(source, tensor, sizes))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unfinished.rename(target)


def _add_header(writer: gguf.GGUFWriter, shape: Shape) -> None:
    import gguf

    writer.add_block_count(shape.layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    by_layer = [shape.kv_heads * (layer in shape.attention) for layer in range(shape.layers)]
    writer.add_head_count_kv(shape.kv_heads if "full_attention_interval" in shape.fields else by_layer)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    adds: dict[type, Callable[..., None]] = {
        float: writer.add_float32,
        int: writer.add_uint32,
        bool: writer.add_bool,
        list: writer.add_array,
    }
    for key, value in shape.fields.items():
        adds[type(value)](f"{shape.architecture}.{key}", value)


def add_tokens(writer: gguf.GGUFWriter, demo: GGUFFile, more: Iterable[str], kind: int) -> None:
    """Write the demo model's vocabulary, followed by tokens of a kind."""
    tokens, kinds = (list(demo.metadata[f"tokenizer.ggml.{part}"]) for part in ("tokens", "token_type"))
    tokens += more
    writer.add_tokenizer_model(demo.metadata["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(demo.metadata["tokenizer.ggml.pre"])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds + [kind] * (len(tokens) - len(kinds)))
    writer.add_token_merges(list(demo.metadata["tokenizer.ggml.merges"]))
    writer.add_bos_token_id(demo.metadata["tokenizer.ggml.bos_token_id"])
    writer.add_eos_token_id(demo.metadata["tokenizer.ggml.eos_token_id"])


def _quantised(name: str, sizes: tuple[int, ...]) -> bool:
    return len(sizes) == 2 and sizes[1] % BLOCK == 0 and "ssm_norm" not in name


def _codes(source: np.random.Generator, sizes: tuple[int, ...]) -> np.ndarray:
    """Return Q8_0 blocks of uniform codes [rows, bytes of a row]."""
    import numpy as np

    blocks = np.empty((sizes[0], sizes[1] // BLOCK, BLOCK_BYTES), np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(SPREAD * 3**0.5 / 127).tobytes(), np.uint8)
    blocks[..., 2:] = source.integers(-127, 128, (*blocks.shape[:2], BLOCK), np.int8).view(np.uint8)
    return blocks.reshape(sizes[0], -1)


def _numbers(source: np.random.Generator, name: str, sizes: tuple[int, ...]) -> np.ndarray:
    """Return float32 numbers: norms are ones, rates of decay negative, all others small."""
    import numpy as np

    if "norm" in name:
        return np.ones(sizes, np.float32)
    if name.endswith("ssm_a"):
        return -source.uniform(0.1, 2.0, sizes).astype(np.float32)
    return source.normal(0.0, 0.3 if "conv" in name else SPREAD, sizes).astype(np.float32)
