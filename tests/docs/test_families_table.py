"""The table of model families names every family that the decoder runs, and says how."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from docs import families_table
from docs.families_table import ENTRIES, Entry
from kvferry.engine.models.families import FAMILIES

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_every_family_is_in_one_row() -> None:
    assert Counter(kind for entry in ENTRIES for kind in entry.types) == Counter(list(FAMILIES))


def test_rows_say_how_their_families_run() -> None:
    rows = {line.split(" | ")[0]: line for line in families_table.families_table().splitlines()}
    (ungated,) = (row for name, row in rows.items() if "**Apertus**" in name)
    assert "a step is one call | safetensors, `.bin`, GGUF" in ungated
    assert ungated.endswith("| attention and MLP |")
    (latent,) = (row for name, row in rows.items() if "**DeepSeek V2**" in name)
    assert "| our decoder, layer by layer |" in latent
    assert latent.endswith("| none |")


def test_families_that_run_differently_do_not_share_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families_table, "ENTRIES", (Entry("both", ("llama", "gemma")),))
    with pytest.raises(ValueError, match="differ"):
        families_table.families_table()


def test_the_readme_does_not_exaggerate() -> None:
    assert "[over fifty](docs/reference/models.md)" in README
    assert len([kind for kind in FAMILIES if "vl" not in kind]) > 50
