"""The chat page's Markdown, rendered by the page itself: what models write, cut anywhere, hostile and endless texts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest

from tests.api_parts import Api, FakeCluster, says, served
from tests.browser import Page
from tests.router.page.chat_tab import opened

PROSE = """# A *title*

Some **bold** text with `code`, [a link](https://example.com/a_(b) "t") and
a second line.

1. First
  - two columns are enough
  - [x] done

   a paragraph
2. Second
   ```py
   if x:
       pass
   ```

| a | b |
|:-:|--:|
| `x|y` | 1 |
| c \\| d |

> quoted
> - item

\\[ a_1 * b_2 * c \\]

***

- loose

- list
"""


@pytest.fixture(scope="module")
def page(tab: Page) -> Iterator[Page]:
    with served(Api(FakeCluster(says("x"))).app) as url:
        opened(tab, url)
        tab.evaluate(
            "globalThis.rendered = (text) => { const node = document.createElement('div');"
            " new MarkdownView(node).show(text); return node; };"
            "globalThis.grown = (text, look) => {"
            " const node = document.createElement('div'), view = new MarkdownView(node);"
            " for (let end = 1; end <= text.length; end += 1) { view.show(text.slice(0, end));"
            "   if (look && node.innerHTML !== rendered(text.slice(0, end)).innerHTML) return text.slice(0, end); }"
            " return node.innerHTML === rendered(text).innerHTML ? '' : node.innerHTML; };"
            "globalThis.bare = (text) => { const node = rendered(text);"
            " node.querySelectorAll('figcaption').forEach((each) => each.remove());"
            " node.querySelectorAll('*').forEach((each) => each.getAttributeNames().forEach((name) =>"
            " ['href', 'start', 'class'].includes(name) || each.removeAttribute(name))); return node.innerHTML; }"
        )
        yield tab
        assert tab.complaints == []


def html(page: Page, text: str) -> str:
    return str(page.evaluate(f"bare({json.dumps(text)})"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "<p>plain</p>"),
        ("one\ntwo", "<p>one<br>two</p>"),
        ("**b** *i* _i_ ~~d~~", "<p><strong>b</strong> <em>i</em> <em>i</em> <del>d</del></p>"),
        ("__b__ a__b__c", "<p><strong>b</strong> a__b__c</p>"),
        ("***both*** **a *b* c**", "<p><em><strong>both</strong></em> <strong>a <em>b</em> c</strong></p>"),
        ("snake_case_name 2*3*4 a * b", "<p>snake_case_name 2<em>3</em>4 a * b</p>"),
        ("**open and *closed*", "<p>**open and <em>closed</em></p>"),
        ("\\*no\\* a\\b", "<p>*no* a\\b</p>"),
        ("`a*b*` ``x`y`` `open", "<p><code>a*b*</code> <code>x`y</code> `open</p>"),
        ("# One\n###### Six ##\n#no", "<h3>One</h3><h6>Six</h6><p>#no</p>"),
        ("text\n---\nmore", "<p>text</p><hr><p>more</p>"),
        ("- a\n- b\n\ntext", "<ul><li>a</li><li>b</li></ul><p>text</p>"),
        ("text\n- a\n1. no\n", "<p>text</p><ul><li>a</li></ul><ol><li>no</li></ol>"),
        ("3. c\n4. d", '<ol start="3"><li>c</li><li>d</li></ol>'),
        ("1. a\n  - b\n    - c\n2. d", "<ol><li>a<ul><li>b<ul><li>c</li></ul></li></ul></li><li>d</li></ol>"),
        ("- a\nlazy\n- b", "<ul><li>a<br>lazy</li><li>b</li></ul>"),
        ("- a\n\n- b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"),
        ("- [ ] a\n- [x]", '<ul><li><span class="task">☐ </span>a</li><li>[x]</li></ul>'),
        ("1. [x] b", '<ol><li><span class="task">☑ </span>b</li></ol>'),
        ("In 2024. It\nwas 7. May", "<p>In 2024. It<br>was 7. May</p>"),
        ("> a\n> > b\n\nc", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>"),
        ("a | b\n--|--\n1 | 2\n\nend", "<div class=\"scroll\"><table><thead><tr><th>a</th><th>b</th></tr></thead>"
         "<tbody><tr><td>1</td><td>2</td></tr></tbody></table></div><p>end</p>"),
        ("$5 and $$a_b_c$$ and \\(x*y*z\\)", '<p>$5 and <code class="math">$$a_b_c$$</code> and '
         '<code class="math">\\(x*y*z\\)</code></p>'),
        ("\\[\na*b*c\n\\]\nend", '<pre class="formula">\\[\na*b*c\n\\]</pre><p>end</p>'),
        ("see https://a.example/x_(y). Or <mailto:a@b.example>", '<p>see <a href="https://a.example/x_(y)">'
         'https://a.example/x_(y)</a>. Or <a href="mailto:a@b.example">mailto:a@b.example</a></p>'),
    ],
)  # fmt: skip
def test_marks_become_elements(page: Page, text: str, shown: str) -> None:
    assert html(page, text) == shown


@pytest.mark.parametrize(
    ("text", "language", "code"),
    [
        ("```python\nprint('<b>')\n```", "python", "print('<b>')"),
        ("~~~\na ``` b\n~~~~", "text", "a ``` b"),
        ("```js\nopen *here*\n", "js", "open *here*\n"),
        ("1. step\n   ```sh title\n     ls\n   ```", "sh", "  ls"),
    ],
)
def test_code_stands_in_a_frame_with_its_language(page: Page, text: str, language: str, code: str) -> None:
    figure = f"rendered({json.dumps(text)}).querySelector('figure')"
    assert page.evaluate(f"{figure}.querySelector('figcaption span').textContent") == language
    assert page.evaluate(f"{figure}.querySelector('pre code').textContent") == code
    assert page.evaluate(f"{figure}.querySelector('button').ariaLabel") == "Copy code"


HOSTILE = [
    "<script>hit()</script><img src=x onerror=hit()><svg onload=hit()><iframe srcdoc='<script>hit()</script>'>",
    "[a](javascript:hit()) [b](JaVaScRiPt:hit()) [c](java\tscript:hit()) [d](&#106;avascript:hit()) <javascript:x>",
    "[a](data:text/html,<script>hit()</script>) [b](vbscript:hit()) [c](file:///etc/passwd) [d](blob:x)",
    "[e](//evil.example) [f](/v1/models) [g](x)",
    '[a](https://x.example/" onmouseover="hit()) ![i](https://x.example/p.png "t\\" onload=hit()")',
    "![x](javascript:hit()) ![y](data:image/svg+xml,<svg onload=hit()>)",
    '```"><img src=x onerror=hit()>\n</code></pre><script>hit()</script>\n```',
    "| <img src=x onerror=hit()> | b |\n|---|---|\n| [x](javascript:hit()) | <style>*{display:none}</style> |",
    "# <base href=//evil.example>\n- <form action=//evil.example><input name=key>\n> <meta http-equiv=refresh>",
    "https://x.example/<script>hit()</script> \u202ehttps://x.example/\u2066",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(page: Page, text: str) -> None:
    """Nothing but elements of Markdown, with the attributes that the page gives them; links are absolute and safe."""
    found = page.evaluate(
        "(() => { globalThis.hits = 0; globalThis.hit = () => { hits += 1; };"
        f" const node = rendered({json.dumps(text)}); document.body.append(node);"
        " const all = [...node.querySelectorAll('*')]; return {"
        " tags: all.map((each) => each.localName), names: all.flatMap((each) => each.getAttributeNames()),"
        " links: all.filter((each) => each.localName === 'a')"
        "   .map((each) => [each.protocol, each.rel, each.target]) }; })()"
    )
    page.evaluate("new Promise((resolve) => setTimeout(resolve, 30))")
    assert page.evaluate("hits") == 0
    page.evaluate("document.body.lastChild.remove()")
    assert set(found["tags"]) <= {
        "p", "a", "br", "em", "strong", "del", "code", "pre", "ul", "ol", "li", "h3", "blockquote", "figure",
        "figcaption", "span", "button", "div", "table", "thead", "tbody", "tr", "th", "td",
    }  # fmt: skip
    assert set(found["names"]) <= {
        "href", "title", "target", "rel", "dir", "class", "tabindex", "role", "aria-label", "type",
    }  # fmt: skip
    for protocol, rel, target in found["links"]:
        assert protocol in ("http:", "https:", "mailto:")
        assert "noopener" in rel
        assert target == "_blank"


def test_a_text_that_grows_looks_like_the_whole_one(page: Page) -> None:
    """Cut at every position: what was settled too early would stay wrong."""
    assert page.evaluate(f"grown({json.dumps(PROSE * 2)}, true)") == ""


def test_random_marks_grow_alike_too(page: Page) -> None:
    draw = random.Random(7)
    pieces = ["*", "**", "_", "`", "```", "~~", "[", "](https://a.example)", "- ", "1. ", "> ", "| ", "|-|-|", "#", " ",
              "  ", "\n", "\n\n", "a", "b c", "\\", "$$", "\\[", "\\]", "---", "<", "!", "h", "\t"]  # fmt: skip
    for _ in range(60):
        text = "".join(draw.choices(pieces, k=60))
        wrong = page.evaluate(f"grown({json.dumps(text)}, false)")
        assert wrong == "", text


def test_what_is_settled_is_not_touched_again(page: Page) -> None:
    """A person may have marked text in it, or have the focus on a button."""
    assert page.evaluate(
        "(() => { const node = document.createElement('div'), view = new MarkdownView(node);"
        " view.show('# a\\n\\n```js\\nx\\n'); const [title, code] = node.children;"
        " view.show('# a\\n\\n```js\\nx\\ny\\n```\\n\\nmore'); const same = node.children[1] === code;"
        " view.show('# a\\n\\n```js\\nx\\ny\\n```\\n\\nmore\\n\\nand more');"
        " return same && node.children[0] === title && node.children[1] === code && code.innerText.includes('y'); })()"
    )


@pytest.mark.parametrize(
    "text",
    [
        "*a" * 50_000, "**a _b" * 30_000, "[" * 100_000, "](" * 50_000, "[a](" * 30_000, "`" * 100_000,
        "".join("`" * n + " " for n in range(400)), ">" * 100_000, "> " * 50_000, "- " * 50_000, " " * 100_000 + "x",
        "\\(" * 50_000, "$$a" * 30_000, "a|" * 50_000 + "\n" + "-|" * 50_000, "# " + "#" * 100_000 + "x", "<a" * 50_000,
        "-" + " " * 100_000 + "x", "".join("  " * n + "- x\n" for n in range(300)), "https://" * 20_000, "(" * 100_000,
        "![" * 50_000, "1. " * 40_000, "\n" * 100_000, "```" * 40_000, "h" * 100_000, "a\n" * 50_000, "- a\n" * 20_000,
    ],
)  # fmt: skip
def test_endless_texts_are_shown_in_bounded_time_and_depth(page: Page, text: str) -> None:
    told = page.evaluate(
        f"(() => {{ const begun = performance.now(), node = rendered({json.dumps(text)}); let depth = 0;"
        " const walk = document.createTreeWalker(node, NodeFilter.SHOW_ELEMENT); while (walk.nextNode()) {"
        "   let up = 0; for (let each = walk.currentNode; each !== node && up < 200; each = each.parentNode) up += 1;"
        "   depth = Math.max(depth, up); } return { depth, spent: performance.now() - begun }; })()"
    )
    assert told["depth"] <= 60
    assert told["spent"] < 5000, "a quarter of a second where the processor is free"
