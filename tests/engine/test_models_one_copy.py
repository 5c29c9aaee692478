"""Weights that processes share: one copy in memory, and the same logits as with weights of one's own."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvferry.engine.models import load_model
from kvferry.engine.models.base import Model
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.kernels.decoder_spec import StoredRows
from kvferry.model_files.source import resolve
from kvferry.runtime.shared_file import SharedFile, make
from tests.engine.test_models_gguf import CPU, Kind, write_gguf
from tests.engine.tiny_models import chunked_logits, family, save_tiny, tokens_for

pytestmark = [
    pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension"),
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="not Linux"),
]

LOAD = """
import os, resource, signal, sys, torch
from kvferry.engine.models import load_model
from kvferry.kernels.cpu import CpuOps
from kvferry.model_files.source import resolve

path, descriptor, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
reports = []

def progress(done):
    reports.append(done)
    if how == "dies" and done > 0.5:
        os.kill(os.getpid(), signal.SIGKILL)

model = load_model(
    resolve(path), device=torch.device("cpu"), dtype=torch.bfloat16, ops=CpuOps(1), quantization="auto",
    progress=progress, weights_fd=descriptor,
)
print("read" if len(reports) > 1 else "mapped", flush=True)
sys.stdin.read()
"""
MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (....) \S+ \S+ (\d+) +/memfd:weights.*?^Rss: +(\d+) kB", re.M | re.S)


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = make()
    yield made
    os.close(made)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("one_copy") / "hf"
    settings = {"head_dim": 32, "tie_word_embeddings": True, "attention_bias": True}
    save_tiny(family("LlamaConfig", **settings), path)
    return path


def load(path: Path, descriptor: int = -1, quantization: str = "auto", ops: CpuOps | None = None) -> Model:
    return load_model(
        resolve(str(path)),
        device=CPU,
        dtype=torch.bfloat16,
        ops=ops or CpuOps(1),
        quantization=quantization,
        weights_fd=descriptor,
    )


def process(path: Path, descriptor: int, how: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LOAD, str(path), str(descriptor), how]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, pass_fds=[descriptor], text=True)  # type: ignore[call-overload,no-any-return]


def mappings(pid: int | str = "self") -> list[tuple[str, str, str]]:
    """Of the shared memory: rights, inode and resident KiB."""
    return MAPPING.findall(Path(f"/proc/{pid}/smaps").read_text())


def same_logits(found: Model, wanted: Model) -> bool:
    tokens = tokens_for(40)
    return torch.equal(chunked_logits(found, tokens, [23, 17]), chunked_logits(wanted, tokens, [23, 17]))


def whole(descriptor: int) -> bool:
    memory = SharedFile(descriptor)
    try:
        return memory.whole
    finally:
        memory.close()


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_who_packs_and_who_maps_compute_as_one_with_weights_of_its_own(llama, descriptor, quantization) -> None:
    own = load(llama, quantization=quantization)
    first, second = (load(llama, descriptor, quantization) for _ in range(2))
    assert whole(descriptor)
    assert same_logits(first, own)
    assert same_logits(second, own)
    assert first.info == second.info == own.info


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_stored_forms_and_experts(kind, tmp_path, descriptor) -> None:
    save_tiny(family("MixtralConfig", num_local_experts=4, num_experts_per_tok=2), tmp_path / "hf")
    fields = {"expert_count": 4, "expert_used_count": 2}
    path = write_gguf(tmp_path / "q.gguf", tmp_path / "hf", "llama", kind=kind, fields=fields)
    own, first, second = load(path), load(path, descriptor), load(path, descriptor)
    assert same_logits(first, own)
    assert same_logits(second, own)
    assert second.info.revision == own.info.revision
    assert second.info.revision.endswith(f"+{kind.name}")


def test_three_that_start_at_once_pack_once_and_map_one_copy(llama, descriptor) -> None:
    processes = [process(llama, descriptor) for _ in range(3)]
    try:
        told = [each.stdout.readline().strip() for each in processes if each.stdout]
        assert sorted(told) == ["mapped", "mapped", "read"]
        found = [mappings(each.pid) for each in processes]
    finally:
        for each in processes:
            each.communicate(timeout=60)
    assert [len(each) for each in found] == [1, 1, 1], "who packed maps it as the others do"
    assert {(rights, inode) for each in found for rights, inode, _ in each} == {
        ("r--s", str(os.fstat(descriptor).st_ino))
    }


def test_a_process_that_is_killed_while_it_packs_leaves_its_turn(llama, descriptor) -> None:
    assert process(llama, descriptor, "dies").wait(60) < 0
    assert os.fstat(descriptor).st_size > 0
    assert not whole(descriptor)
    assert same_logits(load(llama, descriptor), load(llama))
    assert whole(descriptor)


def test_weights_of_another_form_are_ones_own(llama, descriptor, caplog) -> None:
    load(llama, descriptor)
    with caplog.at_level(logging.INFO):
        model = load(llama, descriptor, "int8")
    assert "not shared with other processes: the other processes have another model" in caplog.text
    assert same_logits(model, load(llama, quantization="int8"))


def test_where_there_is_no_room_weights_are_ones_own(llama, descriptor, caplog, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("kvferry.engine.models.shared_weights.write", full)
    with caplog.at_level(logging.INFO):
        model = load(llama, descriptor)
    assert caplog.text.count("not shared with other processes: out of memory") == 1
    assert same_logits(model, load(llama))
    assert os.fstat(descriptor).st_size == 0


def test_a_file_that_cannot_grow_is_no_room(descriptor) -> None:
    """Found out when a layer is packed, not by a signal when it is written."""
    reading = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    ops = CpuOps(1)
    ops.kernels.pack_into(reading)
    with pytest.raises(MemoryError):
        ops.packed([StoredRows("BF16", torch.zeros(32, 64, dtype=torch.uint8))], 32)
    os.close(reading)


def test_what_is_asked_for_outside_the_file_is_refused(llama, descriptor) -> None:
    ops = CpuOps(1)
    load(llama, descriptor, ops=ops)
    for place in ((64, 32, -1, [(0, 1 << 30)]), (64, 32, 1 << 30, [(0, 0)]), (64, 32, -1, [(0, -64)])):
        with pytest.raises(IndexError):
            ops.kernels.placed(place)
    for place in ((64, 32, -1, [(77, 0)]), (64, 64, -1, [(0, 0)]), (0, 32, -1, [(0, 0)])):
        with pytest.raises(ValueError, match="panel"):
            ops.kernels.placed(place)
