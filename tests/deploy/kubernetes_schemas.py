"""Kubernetes' own schemas of its objects, of any of its versions."""

from __future__ import annotations

import functools

import kubernetes_validate
from kubernetes_validate import utils

from tests.deploy.manifests import Manifest

# Every object would have the definitions of all kinds parsed again, megabytes for each version.
utils.schema_contents = functools.cache(utils.schema_contents)
utils.all_versions = functools.cache(utils.all_versions)


def check_object(item: Manifest, version: str) -> None:
    """Raises kubernetes_validate.ValidationError, also for a field that the version does not know."""
    kubernetes_validate.validate(item, version, strict=True)
