"""Ranks that have a device and a pool each, as on GPUs: here over gloo, on CPUs."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from kvferry.engine.fault_isolation import DeviceLost
from kvferry.engine.models.base import ForwardAbandoned
from kvferry.engine.ranks import device_group
from kvferry.engine.ranks.device_group import DeviceGroup
from kvferry.engine.ranks.rendezvous import FileRendezvous, TcpRendezvous
from kvferry.kernels.cpu import CpuOps, instruction_set
from kvferry.protocol.errors import ConfigError
from tests.engine.joined_ranks import CPU, DIVISIBLE, Pooled, connected, expect_equal, joined_ranks, whole
from tests.engine.tiny_models import OURS, family, oracle_logits, save_tiny, tokens_for

pytestmark = pytest.mark.usefixtures("one_thread")
FOUR = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}


@pytest.mark.parametrize("name", DIVISIBLE)
def test_two_ranks_compute_what_one_process_does_and_each_keeps_its_heads(name: str, tmp_path: Path) -> None:
    save_tiny(OURS[name](), tmp_path)
    with joined_ranks(tmp_path, 2, apart=True) as ranks:
        expect_equal(ranks, whole(tmp_path))


def test_four_ranks_do(tmp_path: Path) -> None:
    save_tiny(family("LlamaConfig", **FOUR), tmp_path)
    tokens = tokens_for(40, 3)
    with joined_ranks(tmp_path, 4, apart=True) as ranks:
        cache = expect_equal(ranks, whole(tmp_path))
        assert cache.kv.shape[3] == 1
        torch.testing.assert_close(cache.step({"c": tokens})[0], oracle_logits(tmp_path, tokens), rtol=2e-4, atol=2e-4)


def test_experts_are_divided_whole(tmp_path: Path) -> None:
    save_tiny(OURS["qwen3-moe"](), tmp_path)
    with joined_ranks(tmp_path, 2, apart=True, whole_experts=True) as ranks:
        expect_equal(ranks, whole(tmp_path))


@pytest.mark.skipif(instruction_set() is None, reason="installed without the CPU extension")
def test_compiled_kernels_do(tmp_path: Path) -> None:
    save_tiny(family("LlamaConfig", head_dim=32), tmp_path)
    with joined_ranks(tmp_path, 2, apart=True, ops=CpuOps) as ranks:
        expect_equal(ranks, whole(tmp_path, CpuOps))


def test_what_is_given_up_goes_on_at_its_layer(tmp_path: Path) -> None:
    save_tiny(family("LlamaConfig"), tmp_path)
    tokens = tokens_for(20, 1)
    with joined_ranks(tmp_path, 2, apart=True) as ranks:
        cache = Pooled(ranks)
        with pytest.raises(ForwardAbandoned) as given_up:
            cache.step({"a": tokens}, lambda: False)
        cache.computed["a"] = 0
        (found,) = cache.step({"a": tokens}, lambda: True, given_up.value.halfway)
    torch.testing.assert_close(found, oracle_logits(tmp_path, tokens), rtol=2e-4, atol=2e-4)


def test_a_block_is_copied_in_all_pools(tmp_path: Path) -> None:
    save_tiny(family("LlamaConfig"), tmp_path)
    with joined_ranks(tmp_path, 2, apart=True) as ranks:
        cache = Pooled(ranks)
        cache.step({"a": tokens_for(9)})
        source, target = cache.blocks["a"][0], cache.free[0]
        with torch.inference_mode():
            ranks.model.copy_block(cache.kv, source, target)
        cache.step({"b": tokens_for(3, 1)})  # behind which the others have done it
    assert all(torch.equal(pool[source], pool[target]) for pool in cache.pools)
    assert not torch.equal(cache.pools[0][target], cache.pools[1][target])


def test_a_rank_that_is_gone_is_a_lost_device(tmp_path: Path) -> None:
    save_tiny(family("LlamaConfig"), tmp_path)
    with joined_ranks(tmp_path, 2, apart=True) as ranks:
        cache = Pooled(ranks)
        cache.step({"a": tokens_for(9)})
        ranks.end()  # its connections end, as with its process
        for name in "bc":
            with pytest.raises(DeviceLost, match="2 ranks can no longer compute together"):
                cache.step({name: tokens_for(9)})


def test_sums_and_gathers_are_of_all_ranks_and_of_any_shape() -> None:
    groups = connected(3)
    brought = [torch.arange(6.0).view(2, 3) + 10 * rank for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        gathered = list(threads.map(lambda each: each[0].gather(each[1]), zip(groups, brought, strict=True)))
        summed = list(threads.map(lambda each: each[0].sum(each[1].clone()), zip(groups, brought, strict=True)))
    assert all(torch.equal(each, torch.stack(brought)) for each in gathered)
    assert all(torch.equal(each, sum(brought, torch.zeros(2, 3))) for each in summed)
    for each in groups:
        each.close()


@pytest.mark.parametrize("closed", [True, False])
def test_a_group_writes_to_no_file_but_its_own_as_it_ends(closed: bool, tmp_path: Path) -> None:
    """Which its descriptor's number was: others may have that by then."""
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    groups = connected(2)
    for each in groups if closed else ():
        each.close()
    assert (set(os.listdir("/proc/self/fd")) == before) == closed
    others = [
        (tmp_path / str(index)).open("wb+") for index in range(8)
    ]  # of which some get numbers that are free again
    del groups
    gc.collect()
    for other in others:
        assert not other.seek(0, os.SEEK_END)
        other.close()


def test_ranks_that_do_not_come_are_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_group, "TIMEOUT", device_group.TIMEOUT * 0.005)
    meeting = os.memfd_create("meeting")
    with pytest.raises(ConfigError, match="the 2 ranks cannot reach each other") as raised:
        DeviceGroup(0, 2, CPU, FileRendezvous(os.dup(meeting))).connect()
    assert raised.value.param == "tensor_parallel_size"
    os.close(meeting)


def test_ranks_of_two_addresses_meet_over_tcp() -> None:
    """As on two hosts."""
    meetings = [TcpRendezvous(f"127.0.0.{rank + 1}", serves=rank == 0) for rank in range(2)]
    groups = [DeviceGroup(rank, 2, CPU, meeting) for rank, meeting in enumerate(meetings)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda group: group.connect(meetings[0].where), groups))
        found = list(threads.map(lambda group: group.gather(torch.full((2,), float(group.rank))), groups))
    assert all(torch.equal(each, torch.tensor([[0.0, 0.0], [1.0, 1.0]])) for each in found)
    ports = {each.laddr.ip for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    assert {"127.0.0.1", "127.0.0.2"} <= ports
    assert not {"0.0.0.0", "::"} & ports, "nobody else is to reach them"
    for each in groups:
        each.close()
