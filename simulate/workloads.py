"""WORKLOADS: the simulator's synthetic workloads, seeded generators of request traces, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil

from kvferry.simulate.machine import Machine
from kvferry.simulate.tool_agents import several_tools, tool_agents
from kvferry.simulate.trace_request import TraceRequest
from kvferry.simulate.trace_writer import TraceParams, Writer

PICTURE_TOKENS = (256, 640, 1280)
"""Tokens that stand for a picture."""
AUDIO_TOKENS_PER_S = Machine().audio_tokens_per_s
"""Tokens that stand for a second of a recording."""
LONGEST_CLIP_S = 30.0
"""Longest recording in a prompt, in seconds: what a model of audio hears at once."""


def low_sharing(params: TraceParams) -> list[TraceRequest]:
    """Return a trace of prompts that share no prefix."""
    writer = Writer(params, "low")
    for at in writer.times(params.rate):
        if writer.full:
            return writer.trace
        writer.request(at, [(f"p{len(writer.trace)}", writer.length(1500))], writer.length(200))
    return writer.trace


def hot_prefix(params: TraceParams) -> list[TraceRequest]:
    """Return a trace in which all prompts share one long system prompt."""
    writer = Writer(params, "hot")
    for at in writer.times(params.rate):
        if writer.full:
            return writer.trace
        writer.request(at, [("system", 6000), (f"p{len(writer.trace)}", writer.length(400))], writer.length(150))
    return writer.trace


def many_prefixes(params: TraceParams) -> list[TraceRequest]:
    """Return a trace with hundreds of long prefixes of different popularity, more than a node can hold."""
    writer = Writer(params, "many")
    names = range(400)
    weights = [1 / (1 + name) ** 0.6 for name in names]
    for at in writer.times(params.rate):
        if writer.full:
            return writer.trace
        (name,) = writer.rng.choices(names, weights)
        writer.request(at, [(f"x{name}", 6016), (f"p{len(writer.trace)}", writer.length(300))], writer.length(100))
    return writer.trace


def chat(params: TraceParams) -> list[TraceRequest]:
    """Return a trace of conversations of several turns, from a few applications."""
    return _conversations(params, "chat", turns=8, first=(10, 3000), said=1500, output=250, pause_s=5.0)


def agents(params: TraceParams) -> list[TraceRequest]:
    """Return a trace of tool-call loops: long tool results, short outputs, short pauses."""
    return _conversations(params, "agents", turns=15, first=(20, 4000), said=700, output=80, pause_s=1.5)


def _conversations(
    params: TraceParams, name: str, *, turns: int, first: tuple[int, int], said: int, output: int, pause_s: float
) -> list[TraceRequest]:
    writer = Writer(params, name)
    for at in writer.times(params.rate / turns):
        if writer.full:
            break
        system = (f"app{writer.rng.randrange(first[0])}", first[1])
        writer.conversation(at, [system], writer.rng.randint(turns // 2, turns + turns // 2), said, output, pause_s)
    return writer.trace


def bursts(params: TraceParams) -> list[TraceRequest]:
    """Return a trace in which two of ten seconds have six tenths of the requests; requests share prefixes."""
    writer = Writer(params, "bursts")
    now = 0.0
    while not writer.full:
        now += writer.rng.expovariate(params.rate * (3.0 if now % 10 < 2 else 0.5))
        prefix = f"b{writer.rng.randrange(30)}"
        writer.request(now, [(prefix, 2048), (f"p{len(writer.trace)}", writer.length(800))], writer.length(150))
    return writer.trace


def documents(params: TraceParams) -> list[TraceRequest]:
    """Return a trace of long documents, with a few questions about each within a minute."""
    writer = Writer(params, "documents")
    questions = 4
    for at in writer.times(params.rate / questions):
        if writer.full:
            break
        name, length = f"d{len(writer.trace)}", min(writer.length(24_000, 0.5), 80_000)
        for _ in range(questions):
            writer.request(
                at, [(name, length), (f"q{len(writer.trace)}", writer.length(60))], writer.length(200), session=name
            )
            at += writer.rng.expovariate(1 / 15)
    return sorted(writer.trace, key=lambda ask: ask.at)


def pictures(params: TraceParams) -> list[TraceRequest]:
    """Return a trace of chats about pictures: half of them are new, the others of different popularity."""
    writer, turns = Writer(params, "pictures"), 2
    names = range(300)
    weights = [1 / (1 + name) for name in names]
    for at in writer.times(params.rate / turns):
        if writer.full:
            break
        (known,) = writer.rng.choices(names, weights)
        name = f"picture{known if writer.rng.random() < 0.5 else f'-{len(writer.trace)}'}"
        context = [
            (f"u{len(writer.trace)}", writer.length(100)),
            (name, PICTURE_TOKENS[len(name) % len(PICTURE_TOKENS)]),
        ]
        writer.conversation(at, context, writer.rng.randint(1, 2 * turns - 1), 60, 120, 10.0, media=(name,))
    return writer.trace


def recordings(params: TraceParams) -> list[TraceRequest]:
    """Return a trace of chats about recordings of up to half a minute, each of which is new; some bring several."""
    writer, turns = Writer(params, "recordings"), 2
    for at in writer.times(params.rate / turns):
        if writer.full:
            break
        clips = [f"clip{len(writer.trace)}-{number}" for number in range(writer.rng.choice((1, 1, 1, 2)))]
        seconds = [min(LONGEST_CLIP_S, writer.rng.lognormvariate(2.3, 0.7)) for _ in clips]
        context = [(f"u{len(writer.trace)}", writer.length(60))]
        context += [(clip, ceil(each * AUDIO_TOKENS_PER_S)) for clip, each in zip(clips, seconds, strict=True)]
        writer.conversation(at, context, writer.rng.randint(1, 2 * turns - 1), 40, 120, 10.0, media=clips)
    return writer.trace


def batch_rows(params: TraceParams) -> list[TraceRequest]:
    """Return a trace of prompts that share no prefix; half of them are a batch's rows, for which nobody waits."""
    return [replace(ask, background=ask.number % 2 > 0) for ask in low_sharing(params)]


def mixed_models(params: TraceParams) -> list[TraceRequest]:
    """Return a trace for two models on separate nodes: agents for one, unshared prompts for the other."""
    half = replace(params, count=-(-params.count // 2))
    first = agents(replace(half, rate=params.rate * 0.7))
    others = [replace(ask, model="n") for ask in low_sharing(replace(half, rate=params.rate * 0.3))]
    moved = len(first)
    return first + [replace(ask, number=ask.number + moved, session=f"n{ask.session}") for ask in others]


WORKLOADS: Mapping[str, Callable[[TraceParams], list[TraceRequest]]] = {
    "low-sharing": low_sharing,
    "hot-prefix": hot_prefix,
    "many-prefixes": many_prefixes,
    "chat": chat,
    "agents": agents,
    "tool-agents": tool_agents,
    "several-tools": several_tools,
    "bursts": bursts,
    "documents": documents,
    "pictures": pictures,
    "recordings": recordings,
    "batch-rows": batch_rows,
    "mixed-models": mixed_models,
}
