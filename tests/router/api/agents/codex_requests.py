"""Requests in the form of Codex CLI 0.171: its headers, fields and items, with texts of our own."""

from __future__ import annotations

import json
from typing import Any

SESSION = "01a226c7-f2fb-7b12-9214-b84bacda901c"
TURN = json.dumps({"session_id": SESSION, "request_kind": "turn", "turn_id": "01a226c7-f32f-7680-b780-8d4dc3ba9499"})
HEADERS = {
    "authorization": "Bearer none",
    "accept": "text/event-stream",
    "originator": "codex_exec",
    "user-agent": "codex_exec/0.171.0 (Debian 12.0.0; x86_64) unknown (codex_exec; 0.171.0)",
    "session-id": SESSION,
    "thread-id": SESSION,
    "x-client-request-id": SESSION,
    "x-codex-beta-features": "remote_compaction_v2",
    "x-codex-turn-metadata": TURN,
    "x-codex-window-id": f"{SESSION}:0",
}


def function(name: str, properties: dict[str, Any], *required: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return {"type": "function", "name": name, "description": f"About {name}.", "strict": False, "parameters": schema}


TEXT, NUMBER = {"type": "string", "description": "a text"}, {"type": "number", "description": "a number"}
COMMAND = function(
    "exec_command",
    {
        "cmd": TEXT,
        "login": {"type": "boolean"},
        "max_output_tokens": NUMBER,
        "prefix_rule": {"type": "array", "items": {"type": "string"}},
        "sandbox_permissions": {"type": "string", "enum": ["use_default", "require_escalated"]},
        "yield_time_ms": NUMBER,
    },
    "cmd",
)
AGENTS = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Other agents.",
    "tools": [
        function("close_agent", {"target": TEXT}, "target"),
        function("wait_agent", {"targets": {"type": "array", "items": {"type": "string"}}, "timeout_ms": NUMBER}),
    ],
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files. The input is no JSON.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF\n%import common.LF\n'},
}
TOOLS = [COMMAND, function("write_stdin", {"chars": TEXT, "session_id": NUMBER}, "session_id"), PATCH, AGENTS]


def said(role: str, text: str, number: int) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    parts = [{"type": kind, "text": text}]
    return {"type": "message", "id": f"msg_01a226c7-f361-7660-90fe-0ff94480934{number}", "role": role, "content": parts}


OPENING = [
    said("developer", "You are a coding agent.", 0),
    said("developer", "<skills_instructions>\nNone.\n</skills_instructions>", 1),
    said("user", "<environment_context>\n  <cwd>/work</cwd>\n</environment_context>", 2),
    said("user", "Look around", 3),
]


def request(*further: dict[str, Any], tools: list[Any] | None = None, **fields: Any) -> dict[str, Any]:
    """The body of a turn whose history goes on with these items."""
    return {
        "model": "SmolLM2-135M-Instruct",
        "stream": True,
        "input": [*OPENING, *further],
        "tools": TOOLS if tools is None else tools,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": SESSION,
        "client_metadata": {"session_id": SESSION, "x-codex-turn-metadata": TURN},
        **fields,
    }


def returned(call: dict[str, Any], text: str) -> list[dict[str, Any]]:
    """A call of an answer and its result, as the next request repeats them."""
    kind = "custom_tool_call_output" if call["type"] == "custom_tool_call" else "function_call_output"
    result = {
        "type": kind,
        "id": "fco_01a226cd-efb3-7200-a128-825fc375d046",
        "call_id": call["call_id"],
        "output": text,
    }
    return [call, result]
