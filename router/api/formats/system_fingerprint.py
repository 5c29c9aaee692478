"""system_fingerprint: names the configuration that computed an answer, in OpenAI's field of that name."""

from __future__ import annotations

import hashlib
from functools import lru_cache

from kvferry.protocol.version import VERSION
from kvferry.router.api.served_models import ServedModel


def system_fingerprint(pool: ServedModel) -> str:
    """Return the fingerprint: the same in every router and after every restart with one version, model and template.

    It differs if the nodes' weights, formats or layouts do (their fingerprints), or the parsers of the output."""
    text, info = pool.text, pool.cluster.info()
    source = "" if text.template is None else text.template.source
    nodes = () if info is None else info.fingerprints
    return _digest(pool.name, pool.adapter[1], text.tool_call_parser, text.reasoning_parser, source, *nodes)


@lru_cache(maxsize=256)
def _digest(*parts: str) -> str:
    return "fp_" + hashlib.blake2b("\0".join((VERSION, *parts)).encode(), digest_size=5).hexdigest()
