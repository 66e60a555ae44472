"""Signed URLs of many objects of one bucket, made of botocore's URL of the first one in a tenth of its CPU.

    https://bucket.s3.amazonaws.com/  en.bin  ?X-Amz-Algorithm=...&X-Amz-Date=...  &X-Amz-Signature=...
    start, by botocore                key     query, by botocore                   HMAC-SHA256 over the rest

botocore takes 0.5 ms for a URL: endpoint rules, events, proxies, and all of the environment. What it decides is the
same for all objects of a bucket. A `UrlSigner` exists only if it makes botocore's own URL of the first object.

Source: AWS Signature Version 4, query parameters (Amazon S3, API reference, sigv4-query-string-auth).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

SIGNER_SECONDS = 50.0
"""Age at which a signer ends. Its last URL is then used for `direct.RENEW_SECONDS` more: together less than the five
minutes for which a signature is valid at least."""


@dataclass(frozen=True)
class UrlSigner:
    """Function from the key of an object to its signed URL, for one bucket and some seconds.

    Attributes:
        client: botocore's client that signed the first URL.
        start: URL up to the key.
        query: query of the URL, without the signature; empty for requests that are not signed.
        credentials: access key, secret key and token that signed it; None: it is not signed.
        until: end of the signer, in seconds of the monotonic clock.
    """

    client: Any
    start: str
    query: str
    credentials: Any = field(repr=False)
    until: float = field(default_factory=lambda: time.monotonic() + SIGNER_SECONDS)

    def holds(self, client: Any, credentials: Any) -> bool:
        """Return whether the client with these credentials would sign the same URLs but for their date."""
        return self.client is client and self.credentials == credentials and time.monotonic() < self.until

    def make_url(self, key: str, method: str = "GET", fields: str = "", headers: Mapping[str, str] | None = None) -> str:
        """Return the URL of a request for an object.

        Args:
            fields: further fields of the query, quoted.
            headers: headers that S3 requires to be signed, those that begin with x-amz-, names in lower case.
        """
        url = self.start + quote(key, safe="/~")
        if not self.query:
            return f"{url}?{fields}" if fields else url
        parts, signed = urlsplit(url), dict(sorted({**(headers or {}), "host": urlsplit(url).netloc}.items()))
        names = ";".join(signed)
        query = self.query.replace("SignedHeaders=host", f"SignedHeaders={quote(names, safe='')}")
        query = f"{fields}&{query}" if fields else query
        lines = "".join(f"{name}:{value}\n" for name, value in signed.items())
        ordered = "&".join(sorted(query.split("&")))
        request = f"{method}\n{parts.path}\n{ordered}\n{lines}\n{names}\nUNSIGNED-PAYLOAD"
        text = f"{self._heading}\n{hashlib.sha256(request.encode()).hexdigest()}"
        return f"{url}?{query}&X-Amz-Signature={_hmac(self._key, text).hex()}"

    @cached_property
    def _fields(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(self.query).items()}

    @cached_property
    def _heading(self) -> str:
        """Algorithm, date and scope of a signature."""
        scope = self._fields["X-Amz-Credential"].partition("/")[2]
        return f"AWS4-HMAC-SHA256\n{self._fields['X-Amz-Date']}\n{scope}"

    @cached_property
    def _key(self) -> bytes:
        key = f"AWS4{self.credentials.secret_key}".encode()
        for part in self._fields["X-Amz-Credential"].split("/")[1:]:
            key = _hmac(key, part)
        return key


def _hmac(key: bytes, text: str) -> bytes:
    # Not `hmac.digest`: it releases the GIL within OpenSSL, and a process forked just then could never hash again.
    return hmac.new(key, text.encode(), "sha256").digest()


def derive_signer(client: Any, credentials: Any, url: str, key: str) -> UrlSigner | None:
    """Return the signer of the bucket of a URL; None if it does not make this very URL.

    Args:
        client: botocore's client, which signed the URL.
        credentials: access key, secret key and token that signed it; None: it is not signed.
        url: signed URL of an object.
        key: key of the object.
    """
    path, _, query = url.partition("?")
    start, signed = path.removesuffix(quote(key, safe="/~")), query.partition("&X-Amz-Signature=")[0]
    signer = UrlSigner(client, start, signed, credentials)
    try:
        return signer if signer.make_url(key) == url else None
    except (KeyError, AttributeError):
        return None


async def frozen_credentials(client: Any) -> Any:
    """Return the present access key, secret key and token of a client of botocore; None if it has none, or hides them.

    Without them every URL is made by botocore.
    """
    with contextlib.suppress(AttributeError):
        if credentials := client._request_signer._credentials:
            return await credentials.get_frozen_credentials()
    return None


def use_regional_endpoint(context: dict[str, Any], **_: Any) -> None:
    """Make botocore sign URLs for the region's endpoint; for signed URLs only, it defaults to s3.amazonaws.com."""
    if context.get("is_presign_request"):
        context["use_global_endpoint"] = False
