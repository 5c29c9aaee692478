"""Synthetic workloads of agents, for the simulator: tool calls with pauses of 1 to 60 s, and single requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvferry.simulate.trace_request import TraceRequest
from kvferry.simulate.trace_writer import TraceParams, Writer


class Tool(NamedTuple):
    """Tool of an agent: its share of the calls, and the seconds that it takes, log-normally distributed."""

    name: str
    share: float
    log_s: float
    spread: float


ONE_TOOL = (Tool("tool", 1.0, 1.6, 1.0),)
TOOLS = (
    Tool("read", 0.30, 0.4, 0.3), Tool("search", 0.20, 0.9, 0.4), Tool("edit", 0.20, 0.7, 0.3),
    Tool("fetch", 0.12, 1.8, 0.5), Tool("test", 0.12, 2.9, 0.5), Tool("build", 0.06, 3.7, 0.3),
)  # fmt: skip


def tool_agents(params: TraceParams) -> list[TraceRequest]:
    """Return a trace of agents of 12 applications, whose only tool takes 1 to 60 s, beside requests that come once.

    A task takes 4 to 20 tool calls and ends with an answer; two of five users then go on, 90 s later on average. Three
    of ten requests are not part of a task."""
    return _tool_agents(Writer(params, "tool-agents"), ONE_TOOL)


def several_tools(params: TraceParams) -> list[TraceRequest]:
    """Return a trace of the same agents with six tools, from reading a file to building a program."""
    return _tool_agents(Writer(params, "several-tools"), TOOLS)


def _tool_agents(writer: Writer, tools: Sequence[Tool]) -> list[TraceRequest]:
    params = writer.params
    once, tasks = params.count * 3 // 10, params.rate * 0.7 / 20
    for at in writer.times(tasks):
        if len(writer.trace) >= params.count - once:
            break
        _agent(writer, at, tools)
    last = max(ask.at for ask in writer.trace if ask.after < 0)
    for _ in range(once):
        prompt = (f"once{len(writer.trace)}", writer.length(2500))
        writer.request(writer.rng.random() * last, [prompt], writer.length(200))
    return writer.trace


def _agent(writer: Writer, at: float, tools: Sequence[Tool]) -> None:
    rng, session, after, app = writer.rng, f"s{len(writer.trace)}", -1, writer.rng.randrange(12)
    context = [(f"app{app}", 3000 + 500 * app), (f"{session}task", writer.length(600))]
    while True:
        for _ in range(rng.randint(4, 20)):
            number = len(writer.trace)
            (tool,) = rng.choices(tools, [each.share for each in tools]) if len(tools) > 1 else tools
            call = writer.request(at, context, writer.length(90), after=after, session=session, tool=tool.name)
            context += [call, (f"{session}result{number}", writer.length(700))]
            after, at = number, min(60.0, max(1.0, rng.lognormvariate(tool.log_s, tool.spread)))
        number = len(writer.trace)
        answer = writer.request(at, context, writer.length(250), after=after, session=session)
        if rng.random() < 0.6:
            return
        context += [answer, (f"{session}more{number}", writer.length(80))]
        after, at = number, rng.expovariate(1 / 90)
