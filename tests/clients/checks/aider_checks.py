"""aider over chat completions (through LiteLLM), without a terminal: its edit formats, and errors."""

from __future__ import annotations

import json

from command_line import HOME, KEY, SCRIPTED, clear, folder, output_of, script
from harness import MODEL, URL, check, full_stop
from relay import relay

clear()
QUIET = (
    "--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings", "--analytics-disable", "--no-pretty",
    "--no-show-release-notes", "--map-tokens", "0", "--no-suggest-shell-commands", "--no-detect-urls",
    "--chat-history-file", str(HOME / "home" / "chat"), "--input-history-file", str(HOME / "home" / "input"),
)  # fmt: skip
FACTS = HOME / "home" / "facts.json"
FACTS.write_text(
    json.dumps({f"openai/{MODEL}": {"max_input_tokens": 8192, "litellm_provider": "openai", "mode": "chat"}})
)


def aider(prompt, *more, url=SCRIPTED, key=KEY, model=MODEL, where=None):
    """What aider writes for one message."""
    argv = ["aider", *QUIET, "--model", f"openai/{model}", "--model-metadata-file", str(FACTS), "--message", prompt]
    return output_of([*argv, *more], where or folder(), OPENAI_API_BASE=f"{url}/v1", OPENAI_API_KEY=key)


@check
def a_whole_file_is_written():
    where = folder()
    aider(script("new.txt\n```\na line\nanother\n```\n"), "--edit-format", "whole", "new.txt", where=where)
    assert (where / "new.txt").read_text() == "a line\nanother\n"


@check
def a_difference_is_applied():
    where = folder()
    (where / "old.py").write_text("def f():\n    return 1\n")
    edit = "old.py\n```python\n<<<<<<< SEARCH\n    return 1\n=======\n    return 2\n>>>>>>> REPLACE\n```\n"
    shown = aider(script(edit), "--edit-format", "diff", "old.py", where=where)
    assert (where / "old.py").read_text() == "def f():\n    return 2\n", shown[-500:]


@check
def without_a_stream_it_does_the_same():
    where = folder()
    aider(script("new.txt\n```\na line\n```\n"), "--edit-format", "whole", "--no-stream", "new.txt", where=where)
    assert (where / "new.txt").read_text() == "a line\n"


@check
def the_demo_model_answers():
    with relay(URL, {"temperature": 0, "max_tokens": 60, **full_stop()}, {}) as (url, statuses):
        shown = aider("Why is the sky blue?", "--chat-mode", "ask", url=url)
    assert statuses == [200]
    assert "Tokens:" in shown


@check
def an_unknown_model_is_told():
    assert "does not exist" in " ".join(aider("Hi", model="no-such-model").split())


@check
def a_wrong_key_is_told():
    shown = aider("Hi", key="wrong")
    assert "AuthenticationError" in shown or "API key" in shown, shown[-500:]


@check
def a_full_context_is_told():
    shown = aider("7" * 100_000)
    assert "context" in shown.lower(), shown[-500:]
