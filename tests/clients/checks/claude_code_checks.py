"""Claude Code over the Messages API, headless."""

from __future__ import annotations

import json
import threading

from command_line import KEY, MCP, SCRIPTED, call, clear, folder, run, script
from harness import MODEL, URL, check
from relay import relay

SHOUT = "mcp__loud__shout"
SERVERS = json.dumps({"mcpServers": {"loud": {"command": MCP[0], "args": MCP[1:]}}})
SERVER = ("--mcp-config", SERVERS, "--strict-mcp-config", "--allowedTools", SHOUT)
FORCED = {"type": "tool", "name": SHOUT, "disable_parallel_tool_use": True}
SHORT = {"temperature": 0, "max_tokens": 150, "stop_sequences": ["."]}
"""Fields that make the demo model's answers short and the same each time."""
clear()


def claude(prompt, *more, url=SCRIPTED, key=KEY, model=MODEL, where=None, retries=2):
    """Events of one turn."""
    env = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_RETRIES": str(retries),
        "DISABLE_AUTOUPDATER": "1",
    }
    argv = ["claude", "-p", prompt, "--model", model, "--output-format", "stream-json", "--verbose", *more]
    return run(argv, where or folder(), **env)


def blocks(events, role, kind):
    """Content blocks of a kind in a role's messages."""
    said = [event["message"]["content"] for event in events if event["type"] == role]
    return [block for content in said if isinstance(content, list) for block in content if block["type"] == kind]


def result(events):
    assert events[-1]["type"] == "result", events[-1]
    return events[-1]


def answer(events):
    ended = result(events)
    assert not ended["is_error"], ended
    return ended["result"]


def failure(events):
    ended = result(events)
    assert ended["is_error"], ended
    return ended["result"]


@check
def the_demo_model_answers():
    options = ("--tools", "", "--system-prompt", "Be terse. " * 60)
    with relay(URL, SHORT, {}) as (url, statuses):
        events = claude("Why is the sky blue?", *options, url=url)
        again = claude("Why is the sky blue?", *options, url=url)
    assert statuses == [200, 200]
    assert answer(events) == answer(again) != ""
    assert result(again)["usage"]["cache_read_input_tokens"] > 150


@check
def it_asks_again_for_as_many_tokens_as_the_context_has():
    with relay(URL, {"temperature": 0, "stop_sequences": ["."]}, {}) as (url, statuses):
        assert answer(claude("Why is the sky blue?", "--tools", "", "--system-prompt", "Be terse.", url=url))
    assert statuses == [400, 200]


@check
def the_demo_model_s_call_is_run_and_it_reads_the_result():
    first, later = (
        {"temperature": 0, "max_tokens": 150, "tool_choice": FORCED},
        {**SHORT, "tool_choice": {"type": "none"}},
    )
    with relay(URL, first, later) as (url, statuses):
        events = claude("Shout hello.", "--tools", "", "--system-prompt", "Be terse.", *SERVER, url=url)
    assert statuses == [200, 200]
    (called,) = blocks(events, "assistant", "tool_use")
    (told,) = blocks(events, "user", "tool_result")
    assert called["input"]["text"].upper() in json.dumps(told["content"])
    assert answer(events)


@check
def a_command_is_run_and_its_result_read():
    steps = ("I look.\n" + call("Bash", command="echo $((40+2))"), "Done.")
    events = claude(script(*steps), "--allowedTools", "Bash")
    assert [block["name"] for block in blocks(events, "assistant", "tool_use")] == ["Bash"]
    (told,) = blocks(events, "user", "tool_result")
    assert (told["content"], told["is_error"]) == ("42", False)
    assert answer(events) == "Done."


@check
def a_file_is_written_and_edited():
    where = folder()
    file = str(where / "new.txt")
    steps = (
        call("Write", file_path=file, content='a "quoted" line\n'),
        call("Edit", file_path=file, old_string="quoted", new_string="changed"),
        "Done.",
    )
    events = claude(script(*steps), "--allowedTools", "Write", "Edit", where=where)
    assert (where / "new.txt").read_text() == 'a "changed" line\n'
    assert answer(events) == "Done."


@check
def a_forbidden_tool_is_an_error_that_the_model_reads():
    events = claude(script(call("Write", file_path="/no/such/folder/x", content="x"), "Denied."))
    assert blocks(events, "user", "tool_result")[0]["is_error"]
    assert answer(events) == "Denied."


@check
def a_tool_of_an_mcp_server_is_called():
    events = claude(script(call(SHOUT, text="hey"), "Done."), *SERVER)
    (told,) = blocks(events, "user", "tool_result")
    assert "HEY" in json.dumps(told["content"])
    assert answer(events) == "Done."


@check
def an_answer_has_the_schema_it_should():
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    events = claude(script(call("StructuredOutput", n=42), "Done."), "--json-schema", json.dumps(schema))
    assert result(events)["structured_output"] == {"n": 42}


@check
def partial_messages_are_streamed():
    events = claude(script("One two three."), "--include-partial-messages")
    deltas = [
        event["event"]["delta"] for event in events if event["type"] == "stream_event" and "delta" in event["event"]
    ]
    assert "".join(delta.get("text", "") for delta in deltas) == "One two three."


@check
def a_sub_agent_runs_in_a_session_of_its_own():
    """Nobody dictates to it."""
    asked = call("Agent", description="look", prompt="Look around.", run_in_background=False)
    events = claude(script(asked, "Done."), "--allowedTools", "Agent")
    assert "No script." in json.dumps(blocks(events, "user", "tool_result")[-1]["content"])
    assert answer(events) == "Done."


@check
def a_session_goes_on():
    where = folder()
    first = claude(script(call("Bash", command="echo one"), "First."), "--allowedTools", "Bash", where=where)
    second = claude(script("Second."), "--resume", result(first)["session_id"], where=where)
    assert answer(second) == "Second."


@check
def sessions_run_side_by_side():
    found = {}

    def one(number):
        found[number] = answer(
            claude(script(call("Bash", command="sleep 1"), f"Done {number}."), "--allowedTools", "Bash")
        )

    threads = [threading.Thread(target=one, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: f"Done {number}." for number in range(3)}


@check
def the_context_is_counted():
    assert "tokens" in answer(claude("/context")).lower()


@check
def an_unknown_model_is_told():
    assert "no-such-model" in failure(claude("Hi", model="no-such-model"))


@check
def a_wrong_key_is_told():
    told = failure(claude("Hi", key="wrong", retries=0))
    assert "key" in told.lower(), told


@check
def a_full_context_is_told():
    told = failure(claude("7" * 100_000))
    assert "too long" in told, told
