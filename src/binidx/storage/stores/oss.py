"""Alibaba Cloud OSS: oss://bucket/key.

Objects are read as those of a web server (`HttpStore`), pinned to the ETag, at URLs that oss2 signs. oss2, the SDK
below ossfs, sends all other requests. Those of ossfs itself are not used: in 2025.5.0 its ranges have a byte too many,
an object that it writes is visible meanwhile, and its signatures are of version 1, which OSS refuses for new buckets.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from binidx.errors import ConfigError
from binidx.storage.interfaces import Range
from binidx.storage.settings import OURS
from binidx.storage.store_protocols import Driver, ObjectInfo, Prices
from binidx.storage.stores.driver_errors import storage_errors
from binidx.storage.stores.fsspec_store import driver_options
from binidx.storage.stores.http import HttpStore

CREDENTIALS = {"key": "OSS_ACCESS_KEY_ID", "secret": "OSS_ACCESS_KEY_SECRET", "token": "OSS_SESSION_TOKEN"}
PLACE_VARIABLES = {"endpoint": "OSS_ENDPOINT", "region": "OSS_REGION"}
"""Option -> variable with its default, as oss2 names it."""

SIGNED_SECONDS = 3_600
"""Time for which a URL is valid: far longer than it is used (`direct.RENEW_SECONDS`), as clocks differ."""

BUILTIN_ERRORS = {404: FileNotFoundError, 409: FileExistsError}


class OssStore(HttpStore):
    """Store of Alibaba Cloud OSS.

    Options are those of ossfs: `endpoint`, `key`, `secret`, `token`; with a `region` signatures are of version 4.
    """

    list_prices = Prices("oss")
    driver = Driver("ossfs", "'binidx[oss]'", "OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET")
    min_part, max_parts, copied_part = 100 << 10, 10_000, 64 << 20

    def __init__(self, uri: str, storage_options: Mapping[str, Any] | None = None) -> None:
        with storage_errors(uri):
            import oss2
        given = dict(storage_options or {})
        self.oss2, self._options = oss2, driver_options(uri, given)
        if not (host := self._options.get("endpoint")):
            raise ConfigError(f"{uri}: no endpoint; set OSS_ENDPOINT=https://HOST, or endpoint in storage_options")
        super().__init__(host if "://" in host else f"https://{host}", {OURS: given.get(OURS), "encoded": True})
        self._given = uri, given

    @staticmethod
    def default_options(uri: str, given: Mapping[str, Any], reading: int) -> dict[str, Any]:
        from fsspec.config import conf

        known = {**conf.get("oss", {}), **given}
        variables = PLACE_VARIABLES if "key" in known else PLACE_VARIABLES | CREDENTIALS  # a token belongs to its key
        return {name: os.environ[variable] for name, variable in variables.items() if variable in os.environ} | known

    def call(self, uri: str, request: Callable[[Any, str], Any]) -> Any:
        """Return `request(bucket, key)` for oss2's client of a bucket, whose connections a forked child does not share.

        Raises:
            FileNotFoundError, FileExistsError: the status is 404, or 409.
            Exception: another one of oss2, or for a failed connection that of requests.
        """
        from requests.adapters import HTTPAdapter
        from urllib3 import Retry

        more = Retry(4, backoff_factor=1, status_forcelist=range(500, 505), allowed_methods=None, raise_on_status=False)
        session = self.oss2.Session(adapter=HTTPAdapter(max_retries=more))
        user, secret, token, region = map(self._options.get, ("key", "secret", "token", "region"))
        signer = self.oss2.StsAuth(user, secret, token, "v4" if region else "v1") if user else self.oss2.AnonymousAuth()
        name, _, key = uri.partition("://")[2].partition("/")
        # Without its CRC, which Python computes where crcmod has no compiled part: an MD5 proves what is sent.
        bucket = self.oss2.Bucket(signer, self.uri, name, session=session, enable_crc=False, region=region)
        try:
            return request(bucket, key)
        except self.oss2.exceptions.RequestError as error:
            raise error.exception from None
        except self.oss2.exceptions.ServerError as error:
            raise BUILTIN_ERRORS.get(error.status, OSError)(f"{error.code}: {error.message}") from error

    def signed(self, uri: str, method: str) -> str:
        return str(self.call(uri, lambda bucket, key: bucket.sign_url(method, key, SIGNED_SECONDS, slash_safe=True)))

    def read_start(self, fs: Any, uri: str, num_bytes: int) -> bytes:
        # Of a smaller object OSS sends all: it takes no range that is not inside the object.
        return bytes(self.call(uri, lambda bucket, key: bucket.get_object(key, (0, num_bytes - 1)).read(num_bytes)))

    def find(self, uri: str, *, pattern: bool) -> list[str]:
        from fsspec.utils import glob_translate

        start = re.split(r"[*?[]", uri)[0] if pattern else f"{uri.rstrip('/')}/"
        matches = re.compile(glob_translate(uri) if pattern else "").match
        with storage_errors(uri):
            found = self.call(start, lambda bucket, key: [*self.oss2.ObjectIterator(bucket, key, max_keys=1_000)])
        return [name for each in found if matches(name := "/".join([*uri.split("/")[:3], each.key]))]

    def put(self, uri: str, data: Sequence[memoryview], *, if_absent: bool = False) -> str:
        body = b"".join(data)
        headers = {"Content-MD5": self.oss2.utils.content_md5(body), "x-oss-forbid-overwrite": str(if_absent).lower()}
        return str(self.call(uri, lambda bucket, key: bucket.put_object(key, body, headers)).headers["ETag"])

    def delete(self, uri: str) -> None:
        self.call(uri, lambda bucket, key: bucket.delete_object(key))

    def upload(self, uri: str, token: str = "") -> OssUpload:
        return OssUpload(self, uri, token)


class OssUpload:
    """Multipart upload: its parts outlive this process until they are completed or aborted."""

    def __init__(self, store: OssStore, uri: str, token: str) -> None:
        self._call, self._oss2, self.token = partial(store.call, uri), store.oss2, token
        with contextlib.suppress(FileNotFoundError):
            if token and self.arrived() is not None:
                return
        self.token = str(self._call(lambda bucket, key: bucket.init_multipart_upload(key).upload_id))

    def arrived(self) -> Mapping[int, tuple[int, str]]:
        parts = self._call(lambda bucket, key: [*self._oss2.PartIterator(bucket, key, self.token)])
        return {part.part_number: (part.size, part.etag) for part in parts}

    def write(self, part: int, data: Sequence[memoryview]) -> str:
        body = b"".join(data)
        proof = {"Content-MD5": self._oss2.utils.content_md5(body)}
        return str(self._call(lambda bucket, key: bucket.upload_part(key, self.token, part, body, headers=proof)).etag)

    def copy(self, part: int, source: ObjectInfo, where: Range) -> str:
        copied = *source.uri.partition("://")[2].partition("/")[::2], (where[0], where[1] - 1)
        pinned = {"x-oss-copy-source-if-match": source.version} if source.version else {}
        return str(self._call(lambda bucket, key: bucket.upload_part_copy(*copied, key, self.token, part, pinned)).etag)

    def complete(self, tags: Mapping[int, str]) -> str:
        parts = [self._oss2.models.PartInfo(part, tag) for part, tag in sorted(tags.items())]
        made = self._call(lambda bucket, key: bucket.complete_multipart_upload(key, self.token, parts))
        return str(made.headers["ETag"])

    def abort(self) -> None:
        self._call(lambda bucket, key: bucket.abort_multipart_upload(key, self.token))
