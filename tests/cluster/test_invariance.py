"""`--batch-invariant` and `--kv-cache-dtype int8` end to end: the same bits on every path a request can take."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.engine.engine import Engine
from kvferry.engine.events import Generated
from kvferry.kernels.cpu import instruction_sets
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.messages import Job, TokenLogprobs
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.settings import WorkerSettings
from kvferry.protocol.work import Generate
from kvferry.worker.engine_factory import assemble
from tests.cluster.oracle import prompts
from tests.cluster.tiny_checkpoints import VOCAB, save_checkpoint
from tests.local_cluster import LocalCluster, local_cluster, scrape, streams_running, value
from tests.paced_steps import PROMPTS_MATTER

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not instruction_sets(), reason="installed without the CPU extension"),
]

NAME = "tiny"
SHAPE: dict[str, Any] = {"family": "LlamaConfig", "head_dim": 32}
PARAMS = SamplingParams(
    max_tokens=20, temperature=0.9, top_p=0.95, seed=1234, ignore_eos=True, logprobs=5, prompt_logprobs=2
)
OTHERS = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
Scores = list[TokenLogprobs | None]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("models") / NAME, **SHAPE)


def make_engine(model: str, budget: int, kv_cache_dtype: str) -> Engine:
    settings = WorkerSettings(
        model=model,
        dtype="bfloat16",
        batch_invariant=True,
        kv_cache_dtype=kv_cache_dtype,
        max_num_batched_tokens=budget,
        max_prefill_tokens_while_decoding=budget,
        max_num_seqs=8,
        kv_blocks=300,
    )
    return assemble(settings).engine


def scores(
    engine: Engine,
    prompt: tuple[int, ...],
    params: SamplingParams = PARAMS,
    others: int = 0,
    each_step: Callable[[Engine, int], None] = lambda engine, step: None,
) -> tuple[Scores, Scores]:
    """Log-probabilities of the prompt's tokens and of those drawn, beside `others` requests of growing length."""
    engine.events.clear()
    for i in range(others):
        engine.add(Job(f"other{i}", 0, prompt[: 3 + 20 * i], 3 + 20 * i, Generate(OTHERS), "router"))
    for _ in range(2 if others else 0):
        engine.step()
    engine.add(Job("probe", 0, prompt, len(prompt), Generate(params), "router"))
    step = 0
    while engine.has_work():
        assert engine.step()
        step += 1
        each_step(engine, step)
    deltas = [event.delta for event in engine.events if isinstance(event, Generated) and event.key[0] == "probe"]
    drawn = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert len(drawn) == params.max_tokens
    return list(deltas[0].prompt_logprobs or ()), list(drawn)


def preempting() -> Callable[[Engine, int], None]:
    """Preempts the probe while its prompt is computed and twice while it generates: what decode steps wrote is computed
    again as a chunk."""
    left = {0, 5, 17}

    def sometimes(engine: Engine, step: int) -> None:
        for request in list(engine.request_table.running):
            if request.job.request_id == "probe" and request.output_len in left:
                left.remove(request.output_len)
                engine.scheduler.preempt(request)

    return sometimes


@pytest.mark.parametrize(("model", "kv_cache_dtype"), [("tiny", "auto"), ("tiny", "int8"), ("smollm2", "auto")])
def test_log_probabilities_have_the_same_bits_on_every_path(model: str, kv_cache_dtype: str, tiny: Path) -> None:
    demo = model == "smollm2"
    prompt = prompts()[-1][:140] if demo else tuple(random.Random(1).choices(range(3, VOCAB), k=290))
    source = "smollm2" if demo else str(tiny)
    whole = make_engine(source, 512, kv_cache_dtype)
    expected = scores(whole, prompt)
    assert len(expected[0]) == len(prompt)
    assert scores(whole, prompt, others=6) == expected, "beside others"
    unscored = replace(PARAMS, prompt_logprobs=None)
    assert scores(whole, prompt, unscored)[1] == expected[1], "its prompt cached"
    assert scores(whole, prompt, unscored, others=3)[1] == expected[1], "cached and beside others"
    assert whole.pool.cached_blocks > 0
    longer = (*prompt, *(entry.token_id for entry in expected[1] if entry is not None))
    chunked = make_engine(source, 33, kv_cache_dtype)
    assert scores(whole, longer, unscored) == scores(chunked, longer, unscored), "blocks that decode steps wrote"
    assert scores(chunked, prompt, others=2) == expected, "in chunks"
    assert scores(chunked, prompt, others=2, each_step=preempting()) == expected, "preempted"
    assert chunked.scheduler.preempted_total == 3


def ask(
    cluster: LocalCluster, prompt: list[int], temperature: float
) -> tuple[str, list[float], list[dict[str, float]]]:
    """Text, log-probability of each token and of the likeliest ones."""
    made = cluster.client.completions.create(
        model=NAME,
        prompt=prompt,
        max_tokens=24,
        temperature=temperature,
        seed=99,
        logprobs=3,
        extra_body={"ignore_eos": True},
    )
    found = made.choices[0].logprobs
    assert found is not None
    return made.choices[0].text, list(found.token_logprobs or ()), list(found.top_logprobs or ())


def test_local_and_disaggregated_answers_are_the_same(tiny: Path) -> None:
    prompt = random.Random(2).choices(range(3, VOCAB), k=300)
    promised = ("--batch-invariant", "--dtype", "bfloat16", "--kv-cache-dtype", "int8")
    arguments = ("--model", str(tiny), *promised, "--kv-blocks", "300", "--threads", "1")
    with local_cluster(*arguments, "--prefill", "0") as cluster:
        local = [ask(cluster, prompt, temperature) for temperature in (0.0, 0.9)]
        cluster.settle()
    with local_cluster(*arguments, **PROMPTS_MATTER) as cluster:
        with streams_running(cluster, NAME, 8):
            shipped = [ask(cluster, prompt, temperature) for temperature in (0.0, 0.9)]
        assert value(scrape(cluster.url), "kvferry_placements_total", kind="remote") >= 1
        cluster.settle()
    assert shipped == local


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float32"}, "--dtype bfloat16"),
        ({"kernels": "reference"}, "--kernels cpu"),
        ({"model_impl": "transformers"}, "--model-impl kvferry"),
    ],
)
def test_what_cannot_be_invariant_is_refused(change: dict[str, Any], words: str, tiny: Path) -> None:
    settings = WorkerSettings(model=str(tiny), dtype="bfloat16", batch_invariant=True, kv_blocks=20)
    with pytest.raises(ConfigError, match=words) as raised:
        assemble(replace(settings, **change))
    assert raised.value.param == "batch_invariant"


def test_head_dims_of_no_whole_panel_are_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "odd", **(SHAPE | {"head_dim": 16}))
    with pytest.raises(ConfigError, match="multiples of 32"):
        assemble(WorkerSettings(model=str(path), dtype="bfloat16", batch_invariant=True, kv_blocks=20))


def test_dense_layers_that_are_not_packed_are_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "odd", **(SHAPE | {"intermediate_size": 33}))
    with pytest.raises(ConfigError, match="even input width"):
        assemble(WorkerSettings(model=str(path), dtype="bfloat16", batch_invariant=True, kv_blocks=20))


def test_nodes_that_compute_otherwise_are_told_apart(tiny: Path) -> None:
    settings = WorkerSettings(model=str(tiny), dtype="bfloat16", kv_blocks=20)
    changes: list[dict[str, object]] = [{}, {"kv_cache_dtype": "int8"}, {"batch_invariant": True}, {"dtype": "float32"}]
    changes.append({"kv_cache_dtype": "int8", "dtype": "float32"})
    prints = {assemble(replace(settings, **change)).fingerprint for change in changes}  # type: ignore[arg-type]
    assert len(prints) == len(changes)
