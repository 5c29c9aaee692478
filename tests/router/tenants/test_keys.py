"""The file of keys: what it may say, what it refuses, how it is followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry.cli.main import run
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.hashing import namespace
from kvferry.protocol.settings import RouterSettings
from kvferry.router.tenants.keyring import Keyring
from kvferry.router.tenants.keys import HASH_PREFIX, entry, key_hash, new_key, read_keys
from kvferry.router.tenants.tenant import NOBODY, Tenant
from kvferry.runtime import watched_file
from tests.waiting import until

LIMITS = "requests_per_minute = 60\ntokens_per_minute = 1000\nconcurrent = 3\npriority = -1\nshare = 2.5\n"


def test_a_file_tells_tenants_their_keys_and_limits() -> None:
    one, two = new_key(), new_key()
    assert one != two
    second = f'other = {{keys = ["{HASH_PREFIX}{key_hash(b"k").hex()}"]}}\n'
    keys = read_keys(second + entry("acme", one) + LIMITS)
    assert keys[key_hash(one.encode())] == Tenant("acme", 60, 1000, 3, -1, 2.5)
    assert keys[key_hash(b"k")] == Tenant("other")
    assert key_hash(two.encode()) not in keys


def test_no_key_stands_in_its_entry() -> None:
    key = new_key()
    assert key not in entry("acme", key)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[acme", "TOML"),
        ("acme = 1", "table"),
        ('["a b"]\nkeys = []', "name"),
        ("[acme]\n", "keys must be a list"),
        ('[acme]\nkeys = ["secret"]', "sha256:"),
        (f'[acme]\nkeys = ["{HASH_PREFIX}{"g" * 64}"]', "hexadecimal"),
        ("[acme]\nkeys = []\nrequests_per_minute = -1", "requests_per_minute"),
        ("[acme]\nkeys = []\nconcurrent = 1.5", "concurrent"),
        ("[acme]\nkeys = []\nconcurrent = true", "concurrent"),
        ("[acme]\nkeys = []\nshare = 0", "share"),
        ("[acme]\nkeys = []\nshare = nan", "share"),
        ("[acme]\nkeys = []\nrpm = 3", "unknown field rpm"),
        (entry("acme", "k") + entry("other", "k"), "listed twice"),
    ],
)
def test_a_mistake_in_the_file_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_keys(text)


def test_settings_and_file_are_known_together(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(entry("acme", "k"))
    ring = Keyring(RouterSettings(api_key="own", api_keys=str(file)))
    assert ring.guards
    assert (ring.tenant(b"own"), ring.tenant(b"k"), ring.tenant(b"x")) == (NOBODY, Tenant("acme"), None)
    assert set(ring.tenants) == {"", "acme"}
    assert not Keyring(RouterSettings()).guards


def test_a_file_that_cannot_be_read_at_first_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--api-keys"):
        Keyring(RouterSettings(api_keys=str(tmp_path / "missing")))
    (tmp_path / "bad").write_text("[acme]\n")
    with pytest.raises(ConfigError, match=r"--api-keys .*keys must be a list"):
        Keyring(RouterSettings(api_keys=str(tmp_path / "bad")))


async def test_a_change_is_followed_and_a_broken_file_keeps_what_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watched_file, "POLL_S", 0.01)
    file = tmp_path / "keys.toml"
    file.write_text(entry("acme", "old"))
    ring = Keyring(RouterSettings(api_keys=str(file)))
    async with ring.followed():
        replacement = tmp_path / "new"
        replacement.write_text(entry("acme", "new") + "concurrent = 4\n")
        os.replace(replacement, file)
        await until(lambda: ring.tenant(b"new") == Tenant("acme", concurrent=4), 2.0)
        assert ring.tenant(b"old") is None
        file.write_text("[acme")
        await until(lambda: "keeping its previous content" in caplog.text, 2.0)
        file.unlink()
        await until(lambda: "No such file" in caplog.text, 2.0)
        assert ring.tenant(b"new") is not None
        file.write_text(entry("other", "third"))
        await until(lambda: ring.tenant(b"third") == Tenant("other"), 2.0)
    assert ring.tenant(b"new") is None
    assert "third" not in caplog.text


def test_the_command_makes_a_key_that_its_lines_admit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["key", "acme"]) == 0
    told = capsys.readouterr()
    key = told.err.split()[-1]
    assert key not in told.out
    assert read_keys(told.out) == {key_hash(key.encode()): Tenant("acme")}
    assert run(["key", "no name"]) == 2


def test_no_two_pairs_of_tenant_and_salt_share_a_namespace() -> None:
    pairs = [
        ("", ""),
        ("", "a"),
        ("a", ""),
        ("a", "b"),
        ("ab", ""),
        ("", "1:ab"),
        ("1", ":ab"),
        ("a", "1:b"),
        ("1:a", "b"),
    ]
    assert len({namespace(*pair) for pair in pairs}) == len(pairs)
    assert namespace("", "") == ""
