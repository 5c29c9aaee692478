"""Takes the screenshots of the documents from a running cluster: `make screenshots`, or `python -m docs.screenshots`.

The chat page and the dashboard are those of `kvferry serve` with the demo model; the answers are the model's. Needs
Chromium."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.browser import CHROMIUM, Page, browser
from tests.local_cluster import local_cluster
from tests.router.page.chat_tab import ENDED, ask, opened, press_button, set_fields

FOLDER = Path(__file__).resolve().parent
MAX_BYTES = 200_000
"""Maximum size of a screenshot, in bytes."""
ANSWER_S = 120.0
"""Maximum time for an answer of the demo model, in seconds."""
LOAD_S, TALKERS = 60.0, 3
"""Duration of the conversations that the dashboard shows, in seconds, and their number."""
QUESTIONS = ("Why is the sky blue?", "And in the evening?", "What is the sea made of?", "Why do birds sing?")
TOOL = {
    "name": "get_weather",
    "description": "The weather at a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}


def main() -> None:
    """Take all screenshots anew."""
    if CHROMIUM is None:
        sys.exit("Chromium is missing; on Debian and Ubuntu: apt-get install chromium")
    with (
        tempfile.TemporaryDirectory() as folder,
        browser(Path(folder) / "profile") as page,
        local_cluster("--prefill", "1", "--decode", "2", forked=False) as cluster,
    ):
        chat(page, cluster.url)
        tools(page)
        dashboard(page, cluster.url)


def chat(page: Page, url: str) -> None:
    """Take the chat page with a conversation, wide and on a phone."""
    opened(page, url)
    set_fields(page, max_tokens="60")
    ask_and_wait(page, "Why is the sky blue?")
    press_button(page, "New chat")
    page.wait("!document.querySelector('.turn')")
    set_fields(page, max_tokens="400")
    ask_and_wait(page, "Write a Python function that reverses a string.")
    screenshot(page, "chat.png", 1280, 800)
    screenshot(page, "chat-phone.png", 390, 844, "dark")


def tools(page: Page) -> None:
    """Take a call of a tool that waits for its result."""
    page.resize(1280, 800)
    press_button(page, "New chat")
    page.wait("!document.querySelector('.turn')")
    set_fields(page, system="", tools=json.dumps([TOOL]), tool_choice="required", max_tokens="200", temperature="0")
    ask_and_wait(page, "What is the weather in Oslo?")
    page.evaluate("document.querySelector('.call textarea').focus()")
    page.type('{"temperature_c": 12, "sky": "rain"}')
    screenshot(page, "chat-tools.png", 960, 640)


def dashboard(page: Page, url: str) -> None:
    """Take the dashboard while conversations with a common beginning run."""
    until = time.monotonic() + LOAD_S
    with ThreadPoolExecutor(TALKERS) as pool:
        conversations = [pool.submit(converse, url, number, until) for number in range(TALKERS)]
        page.resize(1280, 1000)
        page.go(f"{url}/dashboard")
        while time.monotonic() < until - 2:
            page.wait("new Promise((resolve) => setTimeout(() => resolve(true), 500))")
        screenshot(page, "dashboard.png", 1280, 1000)
        for each in conversations:
            each.result()


def converse(url: str, number: int, until: float) -> None:
    """Ask one question after the other, each with the conversation so far."""
    with httpx.Client(base_url=url, timeout=ANSWER_S) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        while time.monotonic() < until:
            messages = [{"role": "system", "content": "You are a helpful assistant who answers briefly. " * 8}]
            for question in QUESTIONS[number % 2 :]:
                messages.append({"role": "user", "content": question})
                body = {"model": model, "messages": messages, "max_tokens": 40, "temperature": 0.2}
                answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
                messages.append(answer["choices"][0]["message"])


def ask_and_wait(page: Page, question: str) -> None:
    """Ask a question and wait for the answer."""
    ask(page, question)
    page.wait("document.getElementById('send').textContent === 'Stop'")
    page.wait(ENDED, ANSWER_S)


def screenshot(page: Page, name: str, width: int, height: int, scheme: str = "light") -> None:
    """Take a screenshot. Exits where it is too large for the documents."""
    page.resize(width, height, scheme)
    page.evaluate("new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve, 300)))")
    page.screenshot(FOLDER / name, width, height, scheme)
    if (size := (FOLDER / name).stat().st_size) > MAX_BYTES:
        sys.exit(f"{name} has {size} bytes, more than {MAX_BYTES}")
    print(f"docs/{name}: {size} bytes")


if __name__ == "__main__":
    main()
