"""Which addresses `checkpoint.upload` takes."""

from __future__ import annotations

from pathlib import Path

from pretrain.config.schema import Config
from pretrain.errors import ConfigError, without_secrets
from pretrain.storage import real
from pretrain.transfer import is_url

KEY = "checkpoint.upload"
_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "file")


def check_store(config: Config) -> None:
    """Raise ConfigError for a `checkpoint.upload` that is no object store to write to."""
    url = config.checkpoint.upload
    shown = without_secrets(url)
    remedy = "give s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or file:///FOLDER"
    if not is_url(url):
        raise ConfigError(f"{KEY}={shown}: is no URL; {remedy}")
    protocol, _, place = url.partition("://")
    if "::" in url or protocol not in _STORES:
        raise ConfigError(f"{KEY}={shown}: checkpoints cannot be written there; {remedy}")
    if not place.strip("/") or (protocol == "file" and not place.startswith("/")):
        raise ConfigError(f"{KEY}={shown}: names no folder; {remedy}")
    if protocol == "file" and real(Path(place)) == real(Path(config.run.dir)):
        raise ConfigError(f"{KEY}={shown}: is run.dir itself; give a folder on another disk")
