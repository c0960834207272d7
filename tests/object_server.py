"""An S3-compatible server (moto's) on the loopback, and what a user sets to reach it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_REASON = 'needs s3fs and moto: pip install -e ".[test]"'


@contextlib.contextmanager
def object_server(bucket: str) -> Iterator[tuple[str, Any]]:
    """Its address, and a client of boto3, which has made the bucket."""
    for module in ("s3fs", "moto", "flask", "flask_cors"):
        pytest.importorskip(module, reason=_REASON)
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    client = boto3.client("s3", endpoint_url=url, aws_access_key_id="a", aws_secret_access_key="b", region_name="us-east-1")
    client.create_bucket(Bucket=bucket)
    yield url, client
    server.stop()


def use_server(monkeypatch: pytest.MonkeyPatch, folder: Path, url: str) -> None:
    """Set credentials and the address of a server."""
    import s3fs

    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "home"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    s3fs.S3FileSystem.clear_instance_cache()
