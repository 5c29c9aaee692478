"""The cluster that all clients share, and the table of what they found."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.protocol.settings import RouterSettings
from kvferry.router.text.loader import load_text_model
from tests.clients.dying_router import dying_router
from tests.clients.environments import OUTCOMES, table
from tests.clients.scripted_model import KEY, scripted_router
from tests.engine_adapter.fleet import SERVED, fleet
from tests.engine_adapter.test_adapter_live import wait_until_ready
from tests.local_cluster import LocalCluster, local_cluster
from tests.router.media import pictures

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


@pytest.fixture(scope="session")
def seeing() -> Iterator[dict[str, str]]:
    """Where clients find a model that takes images and transcribes speech, with two pictures and a sound for it."""
    shown = [pictures.data_url(pictures.png(64, 64, shade), pictures.PNG) for shade in (10, 200)]
    with fleet() as running:
        engine = running.add(modalities=["image", "audio"], hears=True)
        running.start_router("smollm2")
        running.ready(1)
        wait_until_ready(engine)
        yield {
            "CHECK_SEEING_URL": running.router_url,
            "CHECK_SEEING_MODEL": SERVED,
            "CHECK_HEARING_MODEL": SERVED,
            "CHECK_MODALITIES": "text,image,audio",
            "CHECK_PICTURES": json.dumps(shown),
            "CHECK_SOUND": base64.b64encode(pictures.wav()).decode(),
        }


@pytest.fixture(scope="session")
def dying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Where clients find a router that is killed while it computes, and another one behind the same gateway."""
    with dying_router(tmp_path_factory.mktemp("dying")) as variables:
        yield {**variables, "CHECK_SECONDS": "150"}


@pytest.fixture(scope="session")
def own_media(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Where clients find own nodes of two random models, one that takes images and one that transcribes."""
    from tests.engine import tiny_vision
    from tests.engine.speech.conftest import noise
    from tests.engine.speech.test_transcriber import wav
    from tests.engine.speech.tiny_whisper import make_tiny_whisper

    folder = tmp_path_factory.mktemp("media")
    (folder / "seeing").mkdir()
    tiny_vision.save("smolvlm", folder / "seeing")
    models = (folder / "seeing", make_tiny_whisper(folder / "hearing"))
    flags = ("--dtype", "float32", "--threads", "1", "--prefill", "0", "--kv-cache-gib", "0.1")
    shown = [tiny_vision.url(tiny_vision.picture(64, 64, seed)) for seed in (1, 2)]
    with local_cluster(*(word for path in models for word in ("--model", str(path))), *flags) as cluster:
        yield {
            "CHECK_SEEING_URL": cluster.url,
            "CHECK_SEEING_MODEL": "seeing",
            "CHECK_HEARING_MODEL": "hearing",
            "CHECK_MODALITIES": "text,image",
            "CHECK_PICTURES": json.dumps(shown),
            "CHECK_SOUND": base64.b64encode(wav(noise(1.3))).decode(),
        }


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """CLIENTS_TABLE names a file that gets the table too."""
    if not OUTCOMES:
        return
    shown = table(OUTCOMES)
    terminalreporter.section("clients")
    terminalreporter.write_line(shown)
    if where := os.environ.get("CLIENTS_TABLE"):
        Path(where).write_text(shown + "\n")
