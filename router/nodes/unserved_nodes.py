"""UnservedNodes: nodes that run none of the models that a router serves; each is logged once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from kvferry.model_files.model_name import ModelName
from kvferry.placement.types import NodeKey
from kvferry.protocol.lease import NodeLease

log = logging.getLogger(__name__)


class UnservedNodes:
    """Nodes that a router does not use because it serves another model."""

    def __init__(self) -> None:
        self._known: set[NodeKey] = set()

    def see(self, leases: Iterable[NodeLease], served: Sequence[ModelName]) -> None:
        """Update the nodes, and log the new ones beside the names of the served models."""
        unserved = {(lease.node_id, lease.epoch): lease for lease in leases}
        for key in unserved.keys() - self._known:
            names = ", ".join(repr(name) for model in served for name in model.all)
            log.warning(
                "node %s runs %r and this router serves %s: not used. If it is the same model, give both the same "
                "--served-model-name", key[0], name_of(unserved[key]).first, names,
            )  # fmt: skip
        self._known = set(unserved)


def name_of(lease: NodeLease) -> ModelName:
    """Return the names of the model that a node runs."""
    return ModelName(lease.model, lease.served_names)
