"""A text side that speaks gpt-oss's format: the demo model's vocabulary with its markers, and a template of our own
that reads and refuses what that family's does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer

from kvferry.model_files.tokenizer import TextTokenizer
from kvferry.router.dispatch.interface import Output, RequestSpec
from kvferry.router.text.parsers.harmony import MARKERS
from kvferry.router.text.template import ChatTemplate
from kvferry.router.text.text_model import TextModel
from tests.api_parts import Api, FakeCluster, demo_text, outputs_for

ON = "<|end|><|start|>assistant"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
TEMPLATE = """
{%- macro kind(spec) %}{{ "number" if spec.type == "integer" else spec.type }}{% endmacro %}
{{- "<|start|>system<|message|>" + (model_identity or "You help.") + "\\nReasoning: " }}
{{- (reasoning_effort or "medium") + "\\nYear: " + strftime_now("%Y")[:2] + "<|end|>" }}
{%- set told = messages[0].content if messages[0].role in ["system", "developer"] else "" %}
{%- if told or tools %}{{ "<|start|>developer<|message|>" + told }}
{%- if tools %}{{ "\\nnamespace functions {" }}{% for tool in tools %}{% set f = tool.function %}
{{- "\\n// " + f.description + "\\ntype " + f.name + " = (_: {" }}
{%- for name, spec in (f.parameters.properties if f.parameters else {}).items() %}
{{- name + ": " + kind(spec) + "," }}{% endfor %}
{{- "}) => any;" }}{% endfor %}{{ "\\n}" }}{% endif %}{{ "<|end|>" }}{% endif %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
{%- if message.role == "user" %}{{ "<|start|>user<|message|>" + message.content + "<|end|>" }}
{%- elif message.role == "tool" %}
{%- if last.name is none %}{{ raise_exception("a result without a call") }}{% endif %}
{{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" }}
{{- message.content|tojson + "<|end|>" }}
{%- elif message.role == "assistant" and "tool_calls" in message %}
{%- if message.content and message.thinking %}{{ raise_exception("content and thinking") }}{% endif %}
{%- if message.content or message.thinking %}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + (message.content or message.thinking) + "<|end|>" }}{% endif %}
{%- set call = message.tool_calls[0].function %}{% set last.name = call.name %}
{{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
{{- call.arguments|tojson + "<|call|>" }}
{%- elif message.role == "assistant" %}{% set last.name = none %}
{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ "<|start|>assistant" }}{% endif %}"""


@cache
def harmony_text() -> TextModel:
    demo = demo_text()
    library = Tokenizer.from_str(demo.tokenizer.library.to_str())
    library.add_special_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    ends = tuple(library.token_to_id(marker) for marker in ("<|return|>", "<|call|>"))
    facts = replace(demo.facts, vocab_size=library.get_vocab_size(), eos_token_ids=(*demo.facts.eos_token_ids, *ends))
    return replace(
        demo, tokenizer=TextTokenizer(library), facts=facts, template=ChatTemplate(TEMPLATE.removeprefix("\n"), {})
    )


def channels_api(text: str, *, per_output: int = 1, **text_model: Any) -> Api:
    """A model that says this to everyone: it ends where the text does, by its last marker if that ends a generation."""
    model = replace(harmony_text(), **text_model)

    def script(spec: RequestSpec) -> Sequence[Output]:
        ids = model.encode(text, add_special_tokens=False)
        if ids[-1] not in model.facts.eos_token_ids:
            return outputs_for(spec, ids, finish="length", per_output=per_output)
        outputs = list(outputs_for(spec, ids, finish="length", per_output=per_output))
        if sum(len(output.token_ids) for output in outputs) == len(ids):
            outputs[-1] = replace(outputs[-1], finish_reason="stop", stop_token=ids[-1])
        return outputs

    return Api(FakeCluster(script), model)
