"""EleutherAI's lm-eval through `local-completions`: its tokenizer is the server's, its tasks are made here."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

import lm_eval
from harness import MODEL, URL, check
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from lm_eval.tasks import TaskManager

TEXT = Path(os.environ["CHECK_TEXT"]).read_text()
EXPECTED = json.loads(os.environ["CHECK_REFERENCE"])
"""transformers' own, in float32: logprob of the whole text after the end-of-sequence token, and its tokens."""
model = LocalCompletionsAPI(base_url=f"{URL}/v1/completions", model=MODEL, num_concurrent=4, max_length=2048)


def instances(kind, *arguments):
    return [Instance(kind, {}, argument, i) for i, argument in enumerate(arguments)]


def task(folder, name, rows, **more):
    """A task of lm-eval's own format over a file of rows."""
    data = Path(folder, f"{name}.json")
    data.write_text("\n".join(map(json.dumps, rows)))
    spec = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
    Path(folder, f"{name}.yaml").write_text(json.dumps({**spec, "test_split": "test", **more}))


def evaluated(name, rows, lm=model, **more):
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = folder
        task(folder, name, rows, **more)
        manager = TaskManager(include_path=folder, include_defaults=False)
        found = lm_eval.simple_evaluate(lm, tasks=[name], task_manager=manager, bootstrap_iters=0)
    return found["results"][name]


@check
def the_tokenizer_is_the_servers():
    assert model.tokenizer_backend == "remote"
    assert len(model.tokenizer.encode(TEXT)) == EXPECTED["tokens"]
    assert model.tokenizer.decode(model.tokenizer.encode(TEXT)) == TEXT


@check
def perplexity_is_that_of_transformers():
    (logprob,) = model.loglikelihood_rolling(instances("loglikelihood_rolling", (TEXT,)))
    ours, theirs = (math.exp(-value / EXPECTED["tokens"]) for value in (logprob, EXPECTED["logprob"]))
    assert abs(ours / theirs - 1) < 0.005, (ours, theirs)


@check
def likely_endings_are_likelier():
    asked = [("The capital of France is", " Paris"), ("The capital of France is", " banana")]
    likely, unlikely = model.loglikelihood(instances("loglikelihood", *asked))
    assert likely[0] > unlikely[0]


@check
def the_greedy_ending_is_told():
    text = model.generate_until(instances("generate_until", ("The capital of France is", {"max_gen_toks": 3})))[0]
    ((_, greedy),) = model.loglikelihood(instances("loglikelihood", ("The capital of France is", text)))
    assert greedy


@check
def texts_end_at_their_stops():
    (text,) = model.generate_until(
        instances("generate_until", ("Once upon a time", {"until": ["."], "max_gen_toks": 60}))
    )
    assert text
    assert "." not in text


@check
def a_task_of_choices():
    rows = [
        {"question": "The capital of France is", "choices": ["Paris", "banana"], "answer": 0},
        {"question": "Two plus two is", "choices": ["purple", "four"], "answer": 1},
    ]
    found = evaluated(
        "choices", rows, output_type="multiple_choice", doc_to_text="{{question}}", doc_to_target="{{answer}}",
        doc_to_choice="{{choices}}", metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    )  # fmt: skip
    assert found["acc,none"] == 1


@check
def a_task_of_perplexity():
    found = evaluated(
        "prose", [{"page": TEXT}], output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{page}}",
        metric_list=[{"metric": "word_perplexity"}],
    )  # fmt: skip
    expected = math.exp(-EXPECTED["logprob"] / len(TEXT.split()))
    assert abs(math.log(found["word_perplexity,none"]) / math.log(expected) - 1) < 0.005


@check
def a_chat_task_generates():
    chat = LocalChatCompletion(base_url=f"{URL}/v1/chat/completions", model=MODEL, num_concurrent=2, max_gen_toks=8)
    messages = json.dumps([{"role": "user", "content": "Say yes."}])
    from lm_eval.models.api_models import JsonChatStr

    (text,) = chat.generate_until(instances("generate_until", (JsonChatStr(messages), {"until": []})))
    assert text
