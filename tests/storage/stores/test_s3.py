"""Requests to S3 by s3fs."""

from __future__ import annotations

from conftest import Bucket
from servers.latency_proxy import latency_proxy

from binidx.storage.location import Location
from binidx.storage.requests.remote_object import RemoteObject
from binidx.storage.writing.publish import create_object


def test_neither_s3fs_nor_botocore_sends_a_failed_read_again(s3: Bucket) -> None:
    """Else their retries were not counted, and multiplied ours."""
    uri = f"{s3.fresh()}/data"
    with create_object(Location.of(uri)) as writer:
        writer.write(bytes(250))
    with latency_proxy(s3.server.endpoint, delay_ms=0) as proxy:
        settings = {"endpoint_url": proxy.endpoint, "binidx": {"fast": False, "hedge": False}}
        reader = RemoteObject(Location.of(uri, settings))
        proxy.become(each=["503", "500", "429"])
        proxy.reset()
        assert bytes(reader.read([(7, 90)])[0]) == bytes(83)
        assert (reader.stats.retries, proxy.counts().requests) == (3, 4)
