"""The clusters that are attacked: one that many attackers share, with two tenants and a cluster secret."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvferry.router.tenants.keys import entry, new_key
from tests.attack.attacked import TENANTS, Attacked
from tests.local_cluster import local_cluster


@contextmanager
def _attacked() -> Iterator[Attacked]:
    """Its folder can be entered by everybody: what kvferry makes in it must guard itself."""
    home = Path(tempfile.mkdtemp(prefix="attacked-"))
    home.chmod(0o755)
    keys = {tenant: new_key() for tenant in TENANTS}
    (home / "keys.toml").write_text("".join(entry(tenant, key) for tenant, key in keys.items()))
    operator, secret = new_key(), secrets.token_hex(24)
    options = {
        "--api-keys": home / "keys.toml", "--kv-disk-path": home / "tier", "--kv-disk-gib": 0.2,
        "--kv-blocks": 100, "--max-model-len": 1024, "--workers": 2,
    }  # fmt: skip
    words = [str(word) for option in options.items() for word in option]
    env = {"KVFERRY_CLUSTER_SECRET": secret, "KVFERRY_API_KEY": operator, "KVFERRY_DATA_DIR": str(home / "data")}
    try:
        with local_cluster(*words, env=env) as cluster:
            yield Attacked(cluster, home, secret, keys | {"": operator})
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def shared_attacked() -> Iterator[Attacked]:
    with _attacked() as made:
        yield made


@pytest.fixture
def attacked(shared_attacked: Attacked) -> Iterator[Attacked]:
    """Afterwards it answers as before, and nothing is in use."""
    yield shared_attacked
    shared_attacked.goes_on()
    shared_attacked.cluster.settle()
