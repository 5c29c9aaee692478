"""The Codex CLI over the Responses API, headless."""

from __future__ import annotations

import json
import threading

from command_line import HOME, KEY, MCP, SCRIPTED, call, clear, folder, run, script
from harness import MODEL, URL, check, full_stop
from relay import relay

FEWER = ("--disable", "multi_agent", "--disable", "goals", "--disable", "shell_tool", "--disable", "unified_exec")
"""Switches off the tools whose descriptions fill a small model's context."""
SERVER = tuple(
    part
    for name, value in (("command", MCP[0]), ("args", MCP[1:]))
    for part in ("-c", f"mcp_servers.loud.{name}={json.dumps(value)}")
)
SHORT = {"temperature": 0, "max_output_tokens": 150, "parallel_tool_calls": False, **full_stop()}
"""Fields that make the demo model's answers short and the same each time."""
clear()
CATALOG = HOME / "home" / "catalog.json"
CATALOG.write_text(
    json.dumps({
        "models": [{
            "slug": MODEL, "display_name": MODEL, "description": "", "supported_reasoning_levels": [],
            "shell_type": "shell_command", "visibility": "list", "supported_in_api": True, "priority": 1,
            "base_instructions": "You are a coding agent.", "supports_reasoning_summaries": False,
            "support_verbosity": False, "apply_patch_tool_type": "freeform", "context_window": 8192,
            "truncation_policy": {"mode": "tokens", "limit": 2000}, "supports_parallel_tool_calls": False,
            "experimental_supported_tools": [],
        }]
    })
)  # fmt: skip


def codex(prompt, *more, url=SCRIPTED, key=KEY, model=MODEL, catalog=True, where=None):
    """Events of one turn. There is no sandbox: only what a script dictates is run, and a harmless tool."""
    config = {
        "model_provider": "kvferry",
        "web_search": "disabled",
        "model_providers.kvferry.name": "kvferry",
        "model_providers.kvferry.base_url": f"{url}/v1",
        "model_providers.kvferry.env_key": "KVFERRY_API_KEY",
        "model_providers.kvferry.request_max_retries": 0,
        "model_providers.kvferry.stream_max_retries": 0,
    }
    if catalog:
        config["model_catalog_json"] = str(CATALOG)
    set_to = [part for name, value in config.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    argv = [
        "codex",
        "exec",
        "--json",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        "-m",
        model,
        *set_to,
        *more,
        prompt,
    ]
    return run(argv, where or folder(), KVFERRY_API_KEY=key)


def items(events, kind):
    return [event["item"] for event in events if event["type"] == "item.completed" and event["item"]["type"] == kind]


def failure(events):
    """The message of a turn that failed."""
    assert events[-1]["type"] == "turn.failed", events[-1]
    return events[-1]["error"]["message"]


def said(events):
    assert events[-1]["type"] == "turn.completed", events[-1]
    return items(events, "agent_message")[-1]["text"]


@check
def the_demo_model_answers():
    where = folder()
    with relay(URL, {**SHORT, "tool_choice": "none"}, {}) as (url, statuses):
        events = codex("Why is the sky blue?", *FEWER, url=url, where=where)
        again = codex("Why is the sky blue?", *FEWER, url=url, where=where)
    assert statuses == [200, 200]
    assert said(events) == said(again)
    assert again[-1]["usage"]["cached_input_tokens"] > events[-1]["usage"]["input_tokens"] * 0.9


@check
def the_demo_model_s_call_is_run_and_it_reads_the_result():
    forced = {"type": "function", "namespace": "mcp__loud", "name": "shout"}
    first, later = {**SHORT, "tool_choice": forced}, {**SHORT, "tool_choice": "none"}
    with relay(URL, first, later) as (url, statuses):
        events = codex("Shout hello.", *FEWER, *SERVER, url=url)
    assert statuses == [200, 200], (statuses, events)
    (used,) = items(events, "mcp_tool_call")
    assert (used["tool"], used["status"]) == ("shout", "completed")
    assert used["result"]["content"][0]["text"] == used["arguments"]["text"].upper()
    assert said(events)


@check
def a_command_is_run_and_its_result_read():
    events = codex(script("I look.\n" + call("exec_command", cmd="echo $((40+2))"), "Done."))
    (command,) = items(events, "command_execution")
    assert (command["exit_code"], command["aggregated_output"].strip()) == (0, "42")
    assert said(events) == "Done."


@check
def without_metadata_of_the_model_it_does_the_same():
    events = codex(script(call("exec_command", cmd="echo $((40+2))"), "Done."), catalog=False)
    assert items(events, "command_execution")[0]["aggregated_output"].strip() == "42"
    assert said(events) == "Done."


@check
def a_patch_in_free_text_is_applied():
    where = folder()
    patch = '*** Begin Patch\n*** Add File: new.txt\n+a "quoted" line\n*** End Patch\n'
    events = codex(script(call("apply_patch", input=patch), "Done."), where=where)
    assert (where / "new.txt").read_text() == 'a "quoted" line\n'
    assert items(events, "file_change")[0]["status"] == "completed"
    assert said(events) == "Done."


@check
def a_tool_of_an_mcp_server_is_called_in_its_namespace():
    events = codex(script(call("mcp__loud__shout", text="hey"), "Done."), *SERVER)
    (used,) = items(events, "mcp_tool_call")
    assert (used["server"], used["tool"], used["status"]) == ("loud", "shout", "completed")
    assert used["result"]["content"][0]["text"] == "HEY"
    assert said(events) == "Done."


@check
def several_calls_follow_one_another():
    steps = [call("exec_command", cmd=f"echo {number}") for number in range(4)]
    events = codex(script(*steps, "Done."))
    assert [item["aggregated_output"].strip() for item in items(events, "command_execution")] == list("0123")
    assert said(events) == "Done."


@check
def a_session_goes_on():
    where = folder()
    first = codex(script(call("exec_command", cmd="echo one"), "First."), where=where)
    thread = first[0]["thread_id"]
    second = codex(script("Second."), "resume", thread, where=where)
    assert said(second) == "Second."
    assert second[-1]["usage"]["input_tokens"] > first[-1]["usage"]["input_tokens"] / 2


@check
def sessions_run_side_by_side():
    found = {}

    def one(number):
        found[number] = said(codex(script(call("exec_command", cmd="sleep 1"), f"Done {number}.")))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: f"Done {number}." for number in range(3)}


@check
def an_unknown_model_is_told():
    assert "does not exist" in failure(codex("Hi", model="no-such-model"))


@check
def a_wrong_key_is_told():
    assert "401" in failure(codex("Hi", key="wrong"))


@check
def a_full_context_is_told():
    told = failure(codex("7" * 100_000, catalog=False))
    assert "maximum context length" in told or "context window" in told, told


@check
def web_search_is_refused_by_name():
    told = failure(codex(script("Done."), "-c", 'web_search="live"', catalog=False))
    assert "web_search" in told
    assert "leave it out" in told
