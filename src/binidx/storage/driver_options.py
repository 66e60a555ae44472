"""What we add to the options of a driver: what random reading needs and nobody sets. What the user gave wins."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

CONCURRENCY = 64
"""Requests in flight at once, over all threads and objects of a process."""

CONCURRENCY_WITHOUT_DRIVER = 128
"""The same where a request costs a tenth of the CPU: at 30 ms to the first byte 64 are 2,100 requests/s, 128 are 4,200,
which one core still carries."""

SPARE = 8
"""Connections beyond that, for requests that are sent twice."""


def with_defaults(protocol: str, given: Mapping[str, Any], reading: int = 0) -> dict[str, Any]:
    if protocol in ("s3", "s3a"):
        from fsspec.config import conf

        from_files = conf.get("s3", {})
        # s3fs opens 10 connections unless told otherwise: 346 requests/s where 64 reach 1,123.
        pool = {"max_pool_connections": reading + SPARE if reading else CONCURRENCY}
        once = {"retries": {"total_max_attempts": 1}} if reading else {}
        config = {**pool, **once, **users_config(given)}
        # s3fs never forgets a listing: an object another process wrote would not exist for ever.
        return {"use_listings_cache": False, **endpoint(from_files, given), **given, "config_kwargs": config}
    if protocol in ("gs", "gcs"):
        if (os.environ.get("STORAGE_EMULATOR_HOST") or given.get("endpoint_url")) and "gcsfs" not in sys.modules:
            # gcsfs asks the gRPC storage-control API for the bucket's type, which no emulator speaks: each operation
            # would wait 30-88 s for the handshake to fail. Read once, when gcsfs is imported.
            os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        return {"use_listings_cache": False, **given}
    return dict(given)


def users_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the user wants of botocore: options given here replace those of fsspec's own configuration key by key."""
    from fsspec.config import conf

    return {**conf.get("s3", {}).get("config_kwargs", {}), **given.get("config_kwargs", {})}


def endpoint(*options: Mapping[str, Any]) -> dict[str, str]:
    """The S3 endpoint of the environment, as an option, unless the options name one.

    botocore would find it by itself, but only once: fsspec takes clients for the same whose options are equal, and goes
    on speaking to the endpoint that was in the environment when the first one was made.
    """
    named = any(each.get("endpoint_url") or each.get("client_kwargs", {}).get("endpoint_url") for each in options)
    ignored = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"
    found = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return {} if named or ignored or not found else {"endpoint_url": found}
