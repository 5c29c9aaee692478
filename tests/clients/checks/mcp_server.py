"""An MCP server on stdin and stdout with one tool, `shout`: it returns its text in capitals."""

from __future__ import annotations

import json
import sys
from typing import Any

SHOUT = {
    "name": "shout",
    "description": "Return the text in capitals.",
    "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}


def result_of(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    match method:
        case "initialize":
            about = {"name": "loud", "version": "1"}
            return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": about}
        case "tools/list":
            return {"tools": [SHOUT]}
        case "tools/call":
            return {"content": [{"type": "text", "text": params["arguments"]["text"].upper()}]}
        case "ping":
            return {}
    return None


for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    found = result_of(asked["method"], asked.get("params") or {})
    told = {"result": found} if found is not None else {"error": {"code": -32601, "message": "no such method"}}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **told}), flush=True)
