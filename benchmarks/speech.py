"""Measures transcription: seconds per second of audio, alternately with transformers, on the same weights.

    python -m benchmarks.speech --model DIRECTORY FILE [FILE ...] [--dtype auto float32] [--rounds 3]

The model is a Whisper checkpoint. Our engine takes all files together, transformers one after the other, in float32."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from kvferry.engine.speech.audio import AudioFile
from kvferry.engine.speech.log_mel import RATE
from kvferry.engine.speech.options import TEMPERATURES, SpeechOptions
from kvferry.engine.speech.track import Track
from kvferry.engine.speech.transcriber import MAX_COMPRESSION, MIN_LOGPROB, NO_SPEECH, SpeechModel, Transcriber
from kvferry.protocol.settings import WorkerSettings
from kvferry.speech_worker.assembly import assemble_speech

OPTIONS = SpeechOptions(False, "", "", TEMPERATURES, "json", False, False, True)
LONGEST_S, WINDOW_S, THREADS = 14_400.0, 30, 2
"""Longest file and length of a window in seconds, and threads that decode files."""


def by_engine(model: SpeechModel, files: Sequence[bytes]) -> list[str]:
    """Return the texts of files that are heard together."""

    async def one(data: bytes, threads: ThreadPoolExecutor) -> str:
        track = Track(data, LONGEST_S, threads)
        found = "".join([each.text async for each in Transcriber(model, track, OPTIONS).segments()])
        await track.close()
        return found.strip()

    async def together() -> list[str]:
        with ThreadPoolExecutor(THREADS) as threads:
            return list(await asyncio.gather(*(one(data, threads) for data in files)))

    return asyncio.run(together())


def samples_of(data: bytes) -> torch.Tensor:
    """Return a file's samples."""
    return AudioFile(data, LONGEST_S).read(int(LONGEST_S) * RATE)


@torch.inference_mode()
def by_transformers(model: Any, extract: Any, decode: Callable[[list[int]], str], files: Sequence[bytes]) -> list[str]:
    """Return the texts of files, one after the other; of long ones with the fallbacks of the paper's reference."""
    found = []
    for data in files:
        samples = samples_of(data)
        is_long = len(samples) > WINDOW_S * RATE
        whole = {"truncation": False, "padding": "longest", "return_attention_mask": True} if is_long else {}
        features = extract(samples.numpy(), sampling_rate=RATE, return_tensors="pt", **whole)
        options = {
            "temperature": TEMPERATURES, "compression_ratio_threshold": MAX_COMPRESSION,
            "logprob_threshold": MIN_LOGPROB, "no_speech_threshold": NO_SPEECH, "condition_on_prev_tokens": True,
            "attention_mask": features.get("attention_mask"),
        } if is_long else {}  # fmt: skip
        ids = model.generate(features.input_features, return_timestamps=True, task="transcribe", **options)
        found.append(decode(ids[0].tolist()).strip())
    return found


def main() -> None:
    """Print a line for each engine: the median of seconds, how often it beats transformers, and equal texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", nargs="+", default=["auto", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    files = [path.read_bytes() for path in arguments.files]
    seconds = sum(len(samples_of(data)) for data in files) / RATE
    theirs: Any = WhisperForConditionalGeneration.from_pretrained(arguments.model).eval()
    extract = WhisperFeatureExtractor(feature_size=theirs.config.num_mel_bins)
    runs = dict[str, Callable[[], list[str]]]()
    for dtype in arguments.dtype:
        model = assemble_speech(WorkerSettings(model=arguments.model, dtype=dtype, kv_cache_gib=0.5)).model
        model.loop.start()
        runs[dtype] = lambda model=model: by_engine(model, files)  # type: ignore[misc]
    end, tokenizer = model.config.tokens.end, model.tokenizer
    runs["transformers"] = lambda: by_transformers(
        theirs, extract, lambda ids: str(tokenizer.decode([id for id in ids if id < end])), files
    )
    took, texts = defaultdict[str, list[float]](list), dict[str, list[str]]()
    for _ in range(arguments.rounds):
        for name, run in runs.items():
            began = time.perf_counter()
            texts[name] = run()
            took[name].append((time.perf_counter() - began) / seconds)
    for name, each in took.items():
        faster = statistics.median(b / a for a, b in zip(each, took["transformers"], strict=True))
        equal = sum(a == b for a, b in zip(texts[name], texts["transformers"], strict=True))
        print(
            f"{name:12} {statistics.median(each):.4f} s/s, {faster:.2f} x as fast, {equal} of {len(files)} texts equal"
        )


if __name__ == "__main__":
    main()
