"""Vocabulary projections beside tied embeddings: with a bias of their own, and where a family never ties."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvferry.engine.models import load_model
from kvferry.kernels.reference import ReferenceOps
from kvferry.model_files.source import resolve
from tests.engine.tiny_dense_families import DENSE
from tests.engine.tiny_hybrids import HYBRIDS
from tests.engine.tiny_models import chunked_logits, oracle_logits, save_tiny, tokens_for

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", ["phi", "nemotron-h", "nemotron-3"])
def test_logits_equal_transformers_where_the_config_ties_embeddings(name: str, tmp_path: Path) -> None:
    """Phi's projection keeps its bias; transformers ties nothing in Nemotron-H."""
    config = (DENSE | HYBRIDS)[name]()
    config.tie_word_embeddings = True
    save_tiny(config, tmp_path)
    source, tokens = resolve(str(tmp_path)), tokens_for(30)
    model = load_model(source, device=torch.device("cpu"), dtype=torch.float32, ops=ReferenceOps(), impl="kvferry")
    with torch.inference_mode():
        wanted = oracle_logits(tmp_path, tokens)
    torch.testing.assert_close(chunked_logits(model, tokens, [17, 13]), wanted, atol=2e-4, rtol=0)
