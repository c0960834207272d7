"""What a cache holds, and whether it is at rest."""

import time
from collections.abc import Callable

import pytest

from pretrain.data.shards import shard_cache
from pretrain.data.shards.reader import PreparedData


@pytest.fixture
def usage() -> Callable[[shard_cache.ShardCache], int]:
    """Bytes of all files of a cache, at one moment. Files being downloaded count with their final size."""

    def bytes_of(cache: shard_cache.ShardCache) -> int:
        with shard_cache._lock(cache.directory / "lock"):
            return sum(shard_cache._total(shard_cache._listing(cache.directory / name)) for name in ("files", "partial"))

    return bytes_of


@pytest.fixture
def wait_for_prefetching() -> Callable[[PreparedData], None]:
    def wait(data: PreparedData) -> None:
        prefetcher = data._url_files._prefetcher
        while True:
            with prefetcher._changed:
                if not (prefetcher._waiting or prefetcher._running):
                    return
            time.sleep(0.001)

    return wait
