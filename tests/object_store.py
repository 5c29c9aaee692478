"""A store with S3's protocol in the test's own process, and the variables by which clients find it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from uuid import uuid4

import pytest

BUCKET = "blocks-of-all"
KEYS = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


@contextlib.contextmanager
def s3(patch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an empty folder."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        url = "http://{}:{}".format(*server.get_host_and_port())
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": url}.items():
            patch.setenv(name, value)
        boto3.client("s3", endpoint_url=url).create_bucket(Bucket=BUCKET)
        yield f"s3://{BUCKET}/{uuid4().hex}"  # what others left in the process's memory is still there
    finally:
        server.stop()
