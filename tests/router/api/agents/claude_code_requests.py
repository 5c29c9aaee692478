"""Requests in the form of Claude Code 2.1: its headers, fields and blocks, with texts of our own."""

from __future__ import annotations

import json
from typing import Any

SESSION = "8c4ce5d2-e830-420a-9801-e31c9a6ccad1"
PATH = "/v1/messages?beta=true"
HEADERS = {
    "accept": "application/json",
    "content-type": "application/json",
    "user-agent": "claude-cli/2.1.197 (external, cli)",
    "x-claude-code-session-id": SESSION,
    "x-stainless-arch": "x64",
    "x-stainless-lang": "js",
    "x-stainless-os": "Linux",
    "x-stainless-package-version": "0.94.0",
    "x-stainless-retry-count": "0",
    "x-stainless-runtime": "node",
    "x-stainless-runtime-version": "v26.3.0",
    "x-stainless-timeout": "600",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,"
    "prompt-caching-scope-2026-01-05,mid-conversation-system-2026-04-07,effort-2025-11-24",
    "anthropic-dangerous-direct-browser-access": "true",
    "anthropic-version": "2023-06-01",
    "x-api-key": "none",
    "x-app": "cli",
}
CACHED = {"cache_control": {"type": "ephemeral"}}


def tool(name: str, properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "name": name,
        "description": f"About {name}.",
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": properties,
            "required": list(required),
            "additionalProperties": False,
        },
    }


TEXT = {"description": "a text", "type": "string"}
TOOLS = [
    tool("Bash", {"command": TEXT, "timeout": {"type": "number"}, "run_in_background": {"type": "boolean"}}, "command"),
    tool("Edit", {"file_path": TEXT, "old_string": TEXT, "replace_all": {"default": False, "type": "boolean"}}),
    tool("TaskUpdate", {
        "metadata": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
        "status": {"anyOf": [{"type": "string", "enum": ["pending"]}, {"type": "string", "const": "deleted"}]},
        "limit": {"type": "integer", "minimum": -9007199254740991, "exclusiveMinimum": 0, "maximum": 9007199254740991},
    }),
]  # fmt: skip


def system(nonce: str) -> list[dict[str, Any]]:
    """The system text; the nonce changes with each request."""
    billing = f"x-anthropic-billing-header: cc_version=2.1.197.efc; cc_entrypoint=cli; cch={nonce};"
    return [
        {"type": "text", "text": billing},
        {"type": "text", "text": "You are an agent.", **CACHED},
        {"type": "text", "text": "\nYou help with software.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ]


def opening(marked: bool) -> list[dict[str, Any]]:
    """The conversation's beginning; only its latest block is marked for the cache."""
    asked = {"type": "text", "text": "Look around", **(CACHED if marked else {})}
    reminder = {"type": "text", "text": "<system-reminder>\nToday is a day.\n</system-reminder>\n\n"}
    return [{"role": "user", "content": [reminder, asked]}, {"role": "system", "content": "Available agents: none."}]


def request(*further: dict[str, Any], nonce: str = "97bd6", **fields: Any) -> dict[str, Any]:
    """The body of a turn whose conversation goes on with these messages."""
    return {
        "model": "SmolLM2-135M-Instruct",
        "messages": [*opening(marked=not further), *further],
        "system": system(nonce),
        "tools": TOOLS,
        "metadata": {"user_id": json.dumps({"device_id": "686a", "account_uuid": "", "session_id": SESSION})},
        "max_tokens": 2000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
        **fields,
    }


def title_request() -> dict[str, Any]:
    """The body of the request for a session's title."""
    schema = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
    asked = {"type": "text", "text": "<session>\nLook around\n</session>"}
    format = {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
    body = request(tools=[], output_config={"effort": "high", "format": format})
    body["messages"] = [{"role": "user", "content": [asked]}]
    return {name: body[name] for name in body if name not in ("thinking", "context_management")}


def returned(content: list[dict[str, Any]], *results: str) -> list[dict[str, Any]]:
    """An answer and the results of its calls, as the next request repeats them."""
    calls = [block for block in content if block["type"] == "tool_use"]
    told = [
        {"tool_use_id": call["id"], "type": "tool_result", "content": text, "is_error": False}
        for call, text in zip(calls, results, strict=True)
    ]
    told[-1] |= CACHED
    return [{"role": "assistant", "content": content}, {"role": "user", "content": told}]
