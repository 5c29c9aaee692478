"""The cluster that all clients share, and the table of what they found."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.protocol.settings import RouterSettings
from kvferry.router.text.load import load_text_model
from tests.clients.environments import OUTCOMES, table
from tests.clients.scripted_model import KEY, scripted_router
from tests.local_cluster import LocalCluster, local_cluster

TEXT = Path(__file__).parents[2] / "benchmarks" / "prose.txt"


@pytest.fixture(scope="session")
def clients_cluster() -> Iterator[LocalCluster]:
    """What `make serve` starts, on a port of the kernel's choice."""
    with local_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def reference() -> dict[str, str]:
    """Variables of checks that compare with transformers: a text, and its log-probability in float32 after the token
    that ends sequences, with the weights of the demo model's file."""
    import torch

    from tests.transformers_demo import load_demo

    text = load_text_model(RouterSettings())
    tokens = text.encode(TEXT.read_text(), add_special_tokens=False)
    model = load_demo()
    read = torch.tensor([[*text.facts.eos_token_ids[:1], *tokens]])
    with torch.inference_mode():
        logprobs = model(read).logits[0, :-1].log_softmax(-1).gather(1, read[0, 1:, None])
    found = {"logprob": float(logprobs.double().sum()), "tokens": len(tokens)}
    return {"CHECK_TEXT": str(TEXT), "CHECK_REFERENCE": json.dumps(found)}


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The demo model's tokenizer as a folder in Hugging Face's layout, for clients that count tokens themselves."""
    folder, text = tmp_path_factory.mktemp("tokenizer"), load_text_model(RouterSettings())
    text.tokenizer.library.save(str(folder / "tokenizer.json"))
    assert text.template is not None
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **text.template.special_tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return {"CHECK_TOKENIZER": str(folder), "CHECK_SECONDS": "170"}


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Where agents find a model that says what their prompts dictate."""
    with scripted_router(tmp_path_factory.mktemp("scripted")) as url:
        yield {"CHECK_SCRIPTED_URL": url, "CHECK_SCRIPTED_KEY": KEY}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """CLIENTS_TABLE names a file that gets the table too."""
    if not OUTCOMES:
        return
    shown = table(OUTCOMES)
    terminalreporter.section("clients")
    terminalreporter.write_line(shown)
    if where := os.environ.get("CLIENTS_TABLE"):
        Path(where).write_text(shown + "\n")
