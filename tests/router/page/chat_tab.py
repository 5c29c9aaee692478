"""What a person does on the chat page, for tests of it."""

from __future__ import annotations

from typing import Any

from kvferry.router.dispatch.interface import Output, RequestSpec
from tests.api_parts import Script, ids_of, outputs_for
from tests.browser import Page

FACTS = "[...document.querySelectorAll('.facts li')].map((item) => item.innerText)"
ENDED = "document.getElementById('send').textContent === 'Send' && document.getElementById('hint').hidden"
WIDER = "document.documentElement.scrollWidth > innerWidth"
SHOWN = (
    "[...document.querySelectorAll('.broken')].filter((node) => node.checkVisibility()).map((node) => node.innerText)"
)
"""Texts of answers that say that their connection broke off."""
BROKEN = ["The connection broke off. Reconnecting…"]
MODEL = "SmolLM2-135M-Instruct"


def answers(*texts: str) -> Script:
    """A script that gives each request the next text, and the last one to all later ones."""
    left = list(texts)

    def script(spec: RequestSpec) -> list[Output]:
        return outputs_for(spec, ids_of(left.pop(0) if len(left) > 1 else left[0]))

    return script


def opened(page: Page, url: str) -> None:
    """The page, with its models. A page of a server that is gone is left first."""
    page.go("about:blank")
    page.resize(1280, 800)
    page.go(f"{url}/")
    page.wait("document.getElementById('model').value !== ''")


def ask(page: Page, question: str) -> None:
    page.evaluate("document.getElementById('ask').focus()")
    page.type(question)
    page.press("Enter")


def asked(page: Page, question: str) -> None:
    """Ask and wait for the answer."""
    count = page.evaluate("chat.current.turns.length")
    ask(page, question)
    page.wait(f"{ENDED} && chat.current.turns.length === {count + 2}")


def said(page: Page) -> list[str]:
    return list(page.evaluate("[...document.querySelectorAll('.said')].map((node) => node.innerText.trim())"))


def wait_for_titles(page: Page, *titles: str) -> None:
    """The list of conversations follows the browser's database, a moment later."""
    shown = "[...document.querySelectorAll('#list a')].map((node) => node.textContent)"
    page.wait(f"JSON.stringify({shown}) === JSON.stringify({list(titles)!r})")


def press_button(page: Page, label: str, *, number: int = -1) -> None:
    """Press the button of this name or text, once it is there; of several ones the last."""
    found = (
        "[...document.querySelectorAll('button')].filter((node) => node.checkVisibility() &&"
        f" [node.ariaLabel, node.textContent].includes({label!r})).at({number})"
    )
    page.wait(found)
    page.evaluate(f"{found}.click()")


def set_fields(page: Page, **fields: str) -> None:
    """Fill fields of the settings, as typing does."""
    page.evaluate("document.getElementById('open-settings').click()")
    for name, value in fields.items():
        page.evaluate(
            f"(() => {{ const node = document.getElementById({name!r}); node.value = {value!r};"
            " node.dispatchEvent(new Event('input', { bubbles: true })); })()"
        )
    page.evaluate("document.getElementById('close-settings').click()")


def recorded(script: Script) -> tuple[Script, list[RequestSpec]]:
    """The script, and the requests that it has answered."""
    specs: list[RequestSpec] = []

    def noting(spec: RequestSpec) -> Any:
        specs.append(spec)
        return script(spec)

    return noting, specs
