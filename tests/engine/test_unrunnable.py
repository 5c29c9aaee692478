"""Checkpoints that cannot run, as transformers writes them: one line that names the model, and exit status 2."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from kvferry.cli.bootstrap import ERROR_PREFIX
from kvferry.engine.models import load_model
from kvferry.kernels.ops import select
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import ConfigError
from tests.engine.tiny_models import family, save_tiny

CPU = torch.device("cpu")


def more_experts_than_there_are():
    return family("Qwen3MoeConfig", num_experts=4, num_experts_per_tok=8, moe_intermediate_size=32, head_dim=16)


def load(path):
    return load_model(resolve(str(path)), device=CPU, dtype=None, ops=select("auto", CPU, batch_invariant=False))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (more_experts_than_there_are, "num_experts_per_tok is 8, of 4 experts"),
    ],
)
def test_a_model_that_cannot_run_is_one_line_with_its_name(config, words, tmp_path):
    save_tiny(config(), tmp_path)
    with pytest.raises(ConfigError, match=words) as caught:
        load(tmp_path)
    assert tmp_path.name in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "change",
    [
        {"num_key_value_heads": "many"},
        {"rope_parameters": ["linear"]},
        {"hidden_size": 65},
        {"num_hidden_layers": 99},
        {"quantization_config": "fp8"},
        {"max_position_embeddings": None},
    ],
)
def test_a_config_that_makes_no_sense_is_one_line_with_its_name(change, tmp_path):
    save_tiny(family("LlamaConfig"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert tmp_path.name in caught.value.message
    assert "\n" not in caught.value.message


def test_a_node_whose_model_cannot_run_ends_with_status_2_and_one_error_line(tmp_path):
    save_tiny(more_experts_than_there_are(), tmp_path)
    command = [sys.executable, "-m", "kvferry.cli.main", "decode", "--model", str(tmp_path), "--kv-blocks", "64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith(ERROR_PREFIX)]
    assert tmp_path.name in line
