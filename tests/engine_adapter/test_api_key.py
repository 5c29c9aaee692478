"""The key of an engine's API: from the settings or a file, and never told."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvferry.engine_adapter.api_key import ApiKey
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.node_settings import AdapterSettings


def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("first\n")
    key = ApiKey(AdapterSettings(engine_api_key_file=str(file)))
    assert key() == "first"
    file.write_text("second key\n")
    assert key() == "second key"


def test_the_last_key_is_kept_while_the_file_is_gone_or_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "key"
    file.write_text("first")
    key = ApiKey(AdapterSettings(engine_api_key_file=str(file)))
    with caplog.at_level(logging.WARNING):
        file.write_text("")
        assert key() == "first"
        file.unlink()
        assert key() == "first"
    assert "keeping the engine" in caplog.text
    assert "first" not in caplog.text


def test_a_key_of_the_environment_needs_no_file() -> None:
    assert ApiKey(AdapterSettings(engine_api_key="secret"))() == "secret"
    assert ApiKey(AdapterSettings())() == ""


@pytest.mark.parametrize("text", ["", "\n", "a\nb", "schlüssel"])
def test_what_is_no_key_is_refused_without_telling_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        ApiKey(AdapterSettings(engine_api_key_file=str(file)))
    assert not text.strip() or text not in refused.value.message


def test_a_missing_file_and_two_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        ApiKey(AdapterSettings(engine_api_key_file=str(tmp_path / "none")))
    (tmp_path / "key").write_text("k")
    with pytest.raises(ConfigError, match="either directly or by a file"):
        ApiKey(AdapterSettings(engine_api_key="k", engine_api_key_file=str(tmp_path / "key")))
