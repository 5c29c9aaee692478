"""Measures the CPU kernels of this machine against its own limits and against the same engine on PyTorch's operations.

    python benchmarks/cpu_kernels.py [--threads 2 --runs 9 --model smollm2 --only limits,dense,attention,recurrent]

The limits (reading memory, multiplying bfloat16 in registers) are measured by the threads that run the kernels, in the
same rounds as everything else. The forms of one subject run in turn, medians are printed, and outputs are compared
before anything is timed. `step` is one decode step of the model without sampling; its GB/s count weights and K/V once.
`engine` is the whole engine with scheduling and greedy sampling, in one process; `overhead` is what its steps cost
beside the model."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

from kvferry.protocol.work import Generate

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cpu_latent import latent_subjects
from benchmarks.cpu_layers import bench_attention, bench_dense, random_pool, report, shuffled_plan
from benchmarks.cpu_recurrent import recurrent_subjects
from benchmarks.limits import READ_BYTES, Limits, interleaved, machine_limits
from benchmarks.overhead import bench_overhead
from kvferry.cli.bootstrap import set_threads
from kvferry.runtime.limits import available_cores

SECTIONS = ("limits", "dense", "attention", "latent", "recurrent", "step", "engine", "overhead")
DECODES = ((1, 128), (1, 2048), (8, 384), (32, 384))
PREFILLS = (128, 512, 2048)
STREAMS = ((1, 32, 96), (8, 64, 48), (32, 32, 48))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    return parser.parse_args()


def bench_latent(ops, limits: Limits, runs: int) -> None:  # type: ignore[no-untyped-def]
    import torch

    for title, ours, theirs, moved, work in latent_subjects(ops, shuffled_plan, random_pool):
        torch.testing.assert_close(ours(), theirs(), atol=3e-2, rtol=3e-2)
        times = interleaved([ours, theirs, limits.read, limits.multiply], 3 if work > 1e10 else runs)
        report(title, limits, times, moved, work)


def bench_recurrent(ops, limits: Limits, runs: int) -> None:  # type: ignore[no-untyped-def]
    """Time recurrent layers; their states and a prompt's products count. Tests compare them with the reference."""
    for title, run, moved, work in recurrent_subjects(ops):
        report(title, limits, interleaved([run, limits.read, limits.multiply], runs), moved, work)


def bench_step(engines, ops, limits: Limits, runs: int) -> None:  # type: ignore[no-untyped-def]
    """Time one decode step and one prefill of the model, hidden states and logits."""
    import torch

    models = [engine.runner.model for engine in engines]
    info, config = models[0].info, models[0].config
    dense = config.hidden_size * (config.q_size + 2 * config.kv_size + 3 * config.intermediate_size)
    weights = config.num_layers * (dense + config.q_size * config.hidden_size)
    head = config.vocab_size * config.hidden_size
    for seqs, query_len, total_len in [(s, 1, n) for s, n in DECODES] + [(1, n, n) for n in PREFILLS]:
        plan, blocks = shuffled_plan(query_len, total_len, seqs)
        pool = random_pool(blocks, info.num_layers, info.num_kv_heads, info.head_dim)
        tokens = torch.randint(0, info.vocab_size, (seqs * query_len,))
        last = torch.arange(seqs) * query_len + query_len - 1

        def form(model, pool=pool, tokens=tokens, plan=plan, last=last):  # type: ignore[no-untyped-def]
            return model.logits(model.forward(tokens, pool, plan)[last])

        forms = [lambda form=form, model=model: form(model) for model in models]
        times = interleaved([*forms, limits.read, limits.multiply], max(3, runs // (1 + query_len // 256)))
        pairs = query_len * (query_len + 1) / 2 + query_len * (total_len - query_len)
        attention = 4.0 * info.num_layers * seqs * pairs * config.q_size
        moved = 2.0 * (weights + head) + 4.0 * info.num_layers * seqs * total_len * config.kv_size
        work = 2.0 * weights * seqs * query_len + 2.0 * head * seqs + attention
        kind = f"step {seqs} x {total_len}" if query_len == 1 else f"prefill {query_len}"
        report(kind, limits, times, moved, work, f" {seqs * query_len / times[0]:7.0f} tokens/s")


def generate(engine, streams: int, prompt: int, output: int) -> float:  # type: ignore[no-untyped-def]
    """Return output tokens per second of the steps in which all streams decode."""
    import random

    from kvferry.protocol.messages import Job
    from kvferry.protocol.sampling import SamplingParams

    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    stamp = time.monotonic_ns()
    for stream in range(streams):
        tokens = tuple(random.Random(stamp + stream).choices(range(1000, 40000), k=prompt))
        engine.add(Job(f"{stamp}-{stream}", 0, tokens, prompt, Generate(params), "bench"))
    while any(request.uncomputed > 1 for request in engine.request_table.running) or engine.request_table.waiting:
        engine.step()
        engine.events.clear()
    begun, steps = time.perf_counter(), 0
    while engine.has_work() and len(engine.request_table.running) == streams:
        engine.step()
        engine.events.clear()
        steps += 1
    taken = time.perf_counter() - begun
    assert steps, "a stream ended before the last one began"
    while engine.has_work():
        engine.step()
    engine.events.clear()
    return streams * steps / taken


def bench_engine(engines, limits: Limits, runs: int) -> None:  # type: ignore[no-untyped-def]
    for streams, prompt, output in STREAMS:
        speeds: list[list[float]] = [[] for _ in engines]
        reads = []
        for _ in range(max(3, runs // 3)):
            for engine, found in zip(engines, speeds, strict=True):
                found.append(generate(engine, streams, prompt, output))
            reads.append(interleaved([limits.read], 1)[0])
        ours, peer = (statistics.median(found) for found in speeds)
        gbs = READ_BYTES / statistics.median(reads) / 1e9
        print(
            f"engine, {streams} streams at {prompt} + {output:4} {ours:9.0f} tokens/s {ours / peer:6.2f} x reference "
            f"(read {gbs:.0f} GB/s)",
            flush=True,
        )


def main() -> None:
    options = parse()
    set_threads(options.threads)
    wanted = options.only.split(",")

    import torch

    from kvferry.kernels.cpu import CpuOps, instruction_set
    from kvferry.protocol.settings import WorkerSettings
    from kvferry.worker.engine_factory import assemble

    if instruction_set() is None:
        sys.exit("kvferry was installed without its CPU extension: install a C++ compiler, then the package again")
    torch.set_num_threads(options.threads)
    ops = CpuOps(options.threads)
    limits = machine_limits(ops)
    load = os.getloadavg()[0]
    print(f"{ops.instruction_set}, {options.threads} threads, load {load:.1f} of {available_cores()} cores")
    with torch.inference_mode():
        if "limits" in wanted:
            gbs, gflops = limits.shares(*interleaved([limits.read, limits.multiply], options.runs))
            print(f"limits: read {gbs:.1f} GB/s, bfloat16 products {gflops:.0f} GFLOP/s")
        if "dense" in wanted:
            bench_dense(ops, limits, options.runs)
        if "attention" in wanted:
            bench_attention(ops, limits, options.runs)
        if "latent" in wanted:
            bench_latent(ops, limits, options.runs)
        if "recurrent" in wanted:
            bench_recurrent(ops, limits, options.runs)
        if {"step", "engine", "overhead"} & set(wanted):
            settings = [
                WorkerSettings(
                    model=options.model, dtype="bfloat16", threads=options.threads, kernels=row, kv_cache_gib=0.5
                )
                for row in ("auto", "reference")
            ]
            engines = [assemble(each).engine for each in settings]
            if "step" in wanted:
                bench_step(engines, ops, limits, options.runs)
            if "engine" in wanted:
                bench_engine(engines, limits, options.runs)
            if "overhead" in wanted:
                bench_overhead(engines[0])


if __name__ == "__main__":
    main()
