"""Requests with media: prompts from nodes that take them, attempts on these nodes alone, the same media at each."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvferry.protocol.adapters import AdapterName
from kvferry.protocol.errors import InvalidRequest, KvferryError, NodeLost, NoNodes, Overloaded, StepFailed
from kvferry.protocol.hashing import chain, root_hash
from kvferry.protocol.index_rows import rows_of
from kvferry.protocol.lease import Load
from kvferry.protocol.media import MediaItem, RenderedPrompt, RenderRequest, block_extras
from kvferry.router.dispatch.prompt_media import PromptMedia, RenderedMedia
from tests.fake_workers import (
    BLOCK,
    CRASH,
    PROMPT,
    SILENCE,
    Bench,
    FakeWorker,
    collect,
    decode,
    encode,
    expected,
    ids,
)  # fmt: skip
from tests.waiting import until

ITEM = MediaItem("image", "cat", 5, 9, b"tensors")
ANSWER = RenderedPrompt(PROMPT, (ITEM,))
ASKED = RenderRequest(b'{"messages":[]}', deadline_s=5.0)
BUSY = Load(running_requests=9)


def seer(name: str, *prompts: Any, modalities: tuple[str, ...] = ("image",), **changes: Any) -> FakeWorker:
    return decode(name, prompts=list(prompts), changes={"modalities": modalities, **changes})


async def rendered(bench: Bench, *modalities: str) -> RenderedMedia:
    return await bench.cluster.media.render(ASKED, modalities or ("image",))


async def test_the_least_busy_node_that_takes_pictures_makes_the_prompt():
    busy, idle = seer("d2", ANSWER, load=BUSY), seer("d3", ANSWER, fingerprint="f3")
    async with Bench([decode("d1"), busy, idle]) as bench:
        found = await rendered(bench)
        assert (found.token_ids, found.media.items, found.media.fingerprint) == (PROMPT, (ITEM,), "f3")
        assert (idle.rendered, busy.rendered) == ([ASKED], [])


async def test_files_that_a_node_needs_again_are_the_requests_own():
    asked = replace(ASKED, files=(b"picture" * 99,))
    node = seer("d2", replace(ANSWER, needs_files=True))
    async with Bench([decode("d1"), node]) as bench:
        found = await bench.cluster.media.render(asked, ("image",))
        assert node.rendered == [asked]
        assert found.media.items == (replace(ITEM, file=asked.files[0]),)
        assert found.media.items[0].file is asked.files[0]


@pytest.mark.parametrize("failure", [CRASH, Overloaded("full"), StepFailed("odd"), ITEM,
                                     RenderedPrompt((1,), (ITEM,)), replace(ANSWER, needs_files=True)])  # fmt: skip
async def test_another_node_makes_the_prompt_if_the_first_fails(failure: Any):
    first, second = seer("d1", failure), seer("d2", ANSWER, load=BUSY)
    async with Bench([first, second]) as bench:
        assert (await rendered(bench)).token_ids == PROMPT
        assert len(first.rendered) == len(second.rendered) == 1


async def test_media_that_end_engines_end_two_at_most():
    async with Bench([seer(f"d{number}", CRASH) for number in range(4)]) as bench:
        with pytest.raises(KvferryError):
            await rendered(bench)
        assert sum(len(worker.rendered) for worker in bench.workers.values()) == 2


async def test_what_an_engine_refuses_is_not_asked_again():
    first, second = seer("d1", InvalidRequest("an odd picture")), seer("d2", ANSWER, load=BUSY)
    async with Bench([first, second]) as bench:
        with pytest.raises(InvalidRequest, match="an odd picture"):
            await rendered(bench)
        assert second.rendered == []


async def test_who_takes_which_media_is_told_by_the_leases():
    lora = (AdapterName("lora", "id"),)
    async with Bench([decode("d1"), seer("d2"), seer("d3", modalities=("audio",), adapters=lora)]) as bench:
        media = bench.cluster.media
        media.check(("image",))
        media.check(("audio",), "id")
        assert media.modalities() == {"image", "audio"}
        assert (media.modalities("id"), media.modalities("unknown")) == ({"audio"}, set())
        for modalities, adapter, missing in (
            (("video",), "", "video"), (("image",), "id", "image"), (("image", "audio"), "", "image and audio"),
        ):  # fmt: skip
            with pytest.raises(InvalidRequest, match=f"no node of the model takes {missing} in"):
                media.check(modalities, adapter)
        with pytest.raises(NoNodes):
            media.check(("image",), "unknown")
        with pytest.raises(NoNodes):
            await rendered(bench, "image", "audio")


async def test_without_any_node_a_request_is_to_come_again():
    async with Bench([]) as bench:
        with pytest.raises(NoNodes):
            bench.cluster.media.check(("image",))


async def test_attempts_go_to_nodes_that_take_the_media_and_carry_them_to_each():
    """The first node dies under the stream; of the others one takes no pictures, and one has another fingerprint."""
    workers = [decode("d1"), seer("d2"), seer("d3", load=BUSY), seer("d4", fingerprint="other")]
    workers[1].crash_after = 5
    async with Bench(workers) as bench:
        media = PromptMedia((ITEM,), bench["d3"].lease.fingerprint)
        outputs = await collect(bench.start(30, media=media))
    assert ids(outputs) == expected(PROMPT, 30)
    jobs = [(worker.node_id, job) for worker in workers for job in worker.jobs]
    assert [name for name, _ in jobs] == ["d2", "d3"]
    assert all(job.media == (ITEM,) for _, job in jobs)


async def test_a_prompt_with_a_picture_is_placed_where_its_picture_is_cached():
    """Both nodes hold the text's blocks, one of them with this picture in them, the other one with another."""
    workers = [seer("d1"), seer("d2"), seer("d3")]
    async with Bench(workers) as bench:
        for name, picture in (("d1", "dog"), ("d2", "cat")):
            lease = bench[name].lease
            held = block_extras([MediaItem("image", picture, 5, 9, b"")], BLOCK)
            hashes = chain(root_hash(lease.fingerprint), PROMPT, BLOCK, extras=held)
            await bench.store.publish(name, lease.epoch, rows_of(hashes), [])
        media = PromptMedia((ITEM,), bench["d1"].lease.fingerprint)
        for _ in range(3):
            assert len(ids(await collect(bench.start(4, media=media)))) == 4
        assert [len(worker.jobs) for worker in workers] == [0, 3, 0]
        predicted = {job.predicted[0] for job in workers[1].jobs}
        assert predicted == {len(PROMPT) - BLOCK}


async def test_encode_nodes_make_prompts_that_other_nodes_can_compute():
    strange = encode("e2", prompts=[ANSWER], changes={"fingerprint": "f2"})
    busy = encode("e1", prompts=[ANSWER], changes={"load": BUSY})
    async with Bench([seer("d1"), busy, strange]) as bench:
        assert (await rendered(bench)).media.fingerprint == "fp"
        assert (len(busy.rendered), strange.rendered, bench["d1"].rendered) == (1, [], [])


async def test_a_node_that_hangs_while_it_makes_a_prompt_is_left_when_it_is_suspected():
    """A request waited for its whole deadline."""
    hangs, other = seer("d1", SILENCE), seer("d2", ANSWER, load=BUSY)
    async with Bench([hangs, other], silence_s=0.3) as bench:
        task = asyncio.create_task(rendered(bench))
        await until(lambda: hangs.rendered)
        hangs.frozen = True
        assert (await asyncio.wait_for(task, 15.0)).token_ids == PROMPT
        assert len(other.rendered) == 1


async def test_the_last_node_is_waited_for_though_it_is_suspected():
    """On a busy machine a request failed because its only node was silent for a second."""
    lone = seer("d1", ANSWER)
    async with Bench([lone], silence_s=0.3) as bench:
        lone.render_s = 1.0
        task = asyncio.create_task(rendered(bench))
        await until(lambda: lone.rendered)
        (entry,) = bench.nodes.entries.values()
        entry.pause(is_silent=True)
        assert (await asyncio.wait_for(task, 15.0)).token_ids == PROMPT


async def test_the_last_node_is_asked_again_once_its_process_is_heard_again():
    """Its stream was silent for too long on a busy machine, and the request ended with node_lost."""
    lone = seer("d1", SILENCE, ANSWER)
    async with Bench([lone]) as bench:
        task = asyncio.create_task(rendered(bench))
        await until(lambda: lone.rendered)
        (entry,) = bench.nodes.entries.values()
        entry.broken(NodeLost("silent for 0.8 s"))
        await asyncio.sleep(0.3)
        assert not task.done()
        entry.opened()
        assert (await asyncio.wait_for(task, 15.0)).token_ids == PROMPT
        assert len(lone.rendered) == 2


async def test_a_node_is_not_blamed_for_a_request_that_was_nearly_out_of_time():
    hangs, other = seer("d1", SILENCE), seer("d2", ANSWER, load=BUSY)
    async with Bench([hangs, other]) as bench:
        with pytest.raises(KvferryError):
            await bench.cluster.media.render(replace(ASKED, deadline_s=0.3), ("image",))
        assert not bench.nodes.breakers.open().nodes
        assert not other.rendered, "nobody waits for its answer any more"
