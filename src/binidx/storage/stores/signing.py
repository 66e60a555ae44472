"""Sessions for S3, and signed URLs: those of a bucket, made of botocore's URL of the first one in a tenth of its CPU.

    https://bucket.s3.amazonaws.com/  en.bin  ?X-Amz-Algorithm=...&X-Amz-Date=...  &X-Amz-Signature=...
    start, by botocore                key     query, by botocore                   HMAC-SHA256 over the rest

botocore takes 0.5 ms for a URL: endpoint rules, events, proxies, and all of the environment. What it decides is the
same for all objects of a bucket. A `UrlSigner` exists only if it makes botocore's own URL of the first object.

Source: AWS Signature Version 4, query parameters (Amazon S3, API reference, sigv4-query-string-auth).
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import hmac
import os
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import msgspec

from binidx.forks import cached_property
from binidx.storage.stores.direct import (
    Address,
    NotDirectError,
    SessionOptions,
    bounded_session,
    direct_address,
    redirect_guard,
)
from binidx.storage.stores.driver_errors import is_malformed

SIGNER_SECONDS = 50.0
"""Age at which a signer ends. Its last URL is then used for `direct.RENEW_SECONDS` more: together less than the five
minutes for which a signature is valid at least."""


CHECKSUM = "x-amz-checksum-crc32"
"""Header with the CRC32 of a body."""

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


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

    def make_url(self, key: str, verb: str = "GET", fields: str = "", headers: Mapping[str, str] = NO_HEADERS) -> str:
        """Return the URL of a request for an object.

        Args:
            fields: further fields of the query, quoted.
            headers: of the request; those of S3, whose names begin with x-amz-, are signed.
        """
        url = self.start + quote(key, safe="/~")
        if not self.query:
            return f"{url}?{fields}" if fields else url
        parts, given = urlsplit(url), {name: value for name, value in headers.items() if name[:6] == "x-amz-"}
        signed = dict(sorted({**given, "host": parts.netloc}.items()))
        names = ";".join(signed)
        query = self.query.replace("SignedHeaders=host", f"SignedHeaders={quote(names, safe='')}")
        query = f"{fields}&{query}" if fields else query
        lines = "".join([f"{name}:{value}\n" for name, value in signed.items()])
        ordered = "&".join(sorted(query.split("&")))
        request = f"{verb}\n{parts.path}\n{ordered}\n{lines}\n{names}\nUNSIGNED-PAYLOAD"
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


async def _frozen_credentials(client: Any) -> Any:
    """Return the present access key, secret key and token of a client of botocore; None if it has none, or hides them.

    Without them every URL is made by botocore.
    """
    with contextlib.suppress(AttributeError):
        if credentials := client._request_signer._credentials:
            return await credentials.get_frozen_credentials()
    return None


def _use_regional_endpoint(context: dict[str, Any], **_: Any) -> None:
    """Make botocore sign URLs for the region's endpoint; for signed URLs only, it defaults to s3.amazonaws.com."""
    if context.get("is_presign_request"):
        context["use_global_endpoint"] = False


async def sign(
    fs: Any,
    method: str,
    wanted: Mapping[str, str],
    headers: Mapping[str, str],
    verb: str = "GET",
    fields: str = "",
) -> Address:
    """Return the address of a direct request, a signed URL.

    Args:
        method: method of botocore's client, such as "get_object".
        wanted: parameters of the method.
        headers: further headers of the request, of which those of S3 are signed. There is no checksum among those
            that are sent if the user's configuration requires none.
        verb: another one than GET for the same object, with the method "get_object".
        fields: further fields of the query of such a request, quoted.

    Raises:
        NotDirectError: the request cannot be sent without the driver.
    """
    from botocore.utils import get_environ_proxies
    from yarl import URL

    await fs.set_session()
    client = await fs.get_s3(wanted["Bucket"])
    credentials, place = await _frozen_credentials(client), (id(fs), wanted["Bucket"])
    signer, signed = _signers.get(place, (None, None))
    is_plain = method == "get_object" and wanted.keys() == {"Bucket", "Key"}
    if verb != "GET" and (not is_plain or fs.s3_additional_kwargs or fs.req_kw or fs.kwargs):
        raise NotDirectError(f"its {verb} requests have parameters of their own")
    if is_plain and signer and signed and signer.holds(client, credentials):
        if client.meta.config.request_checksum_calculation == "when_required":
            headers = {name: value for name, value in headers.items() if name != CHECKSUM}
        url = URL(signer.make_url(wanted["Key"], verb, fields, headers), encoded=True)
        return replace(signed, url=url, headers={**signed.headers, **headers})
    model = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[method])
    given = {**fs.s3_additional_kwargs, **fs.req_kw, **wanted}
    arguments = {name: value for name, value in given.items() if name in model.input_shape.members}
    client.meta.events.register_first("before-endpoint-resolution.s3", _use_regional_endpoint, unique_id="binidx")
    url = await client.generate_presigned_url(method, Params=arguments, ExpiresIn=3600)
    config = client.meta.config
    proxies = get_environ_proxies(url) if config.proxies is None else config.proxies
    if proxies.get(urlsplit(url).scheme):
        raise NotDirectError("a proxy stands before it")
    payer = {"x-amz-request-payer": "requester"} if arguments.get("RequestPayer") else {}
    names = parse_qs(urlsplit(url).query).get("X-Amz-SignedHeaders", ["host"])[0].split(";")
    if unknown := set(names) - {"host", *payer}:
        raise NotDirectError(f"its URL is signed with {', '.join(sorted(unknown))}")
    address = await direct_address(fs, url, payer, lambda: session_options(fs, config, urlsplit(url).scheme))
    if is_plain and arguments == wanted:
        _signers[place] = signer, _ = derive_signer(client, credentials, url, wanted["Key"]), address
        if signer and verb != "GET":
            return await sign(fs, method, wanted, headers, verb, fields)
    if verb != "GET":
        raise NotDirectError(f"its {verb} requests are not signed as those of other objects")
    return replace(address, headers={**address.headers, **headers})


_signers: dict[tuple[int, str], tuple[UrlSigner | None, Address]] = {}
"""(id of a filesystem, which is kept for ever; bucket) -> signer of its URLs, and the address of an object."""


def quick_session(options: Mapping[str, Any]) -> Any:
    """Return a session of aiobotocore whose first client takes 40 ms of CPU less, a half.

    Its models are parsed in a third of the time, and no 2,600 calls of stat find out whether S3 is a service.

    Args:
        options: of the session.
    """
    from aiobotocore.session import AioSession  # type: ignore[import-untyped]
    from botocore.loaders import JSONFileLoader

    class QuickLoader(JSONFileLoader):  # type: ignore[misc]
        def load_file(self, file_path: str) -> Any:
            for suffix in (".json", ".json.gz"):
                with contextlib.suppress(FileNotFoundError):
                    data = Path(file_path + suffix).read_bytes()
                    return msgspec.json.decode(gzip.decompress(data) if suffix == ".json.gz" else data)
            return super().load_file(file_path)

    session = AioSession(**options)
    loader = session.get_component("data_loader")
    loader.file_loader = QuickLoader()
    loader.list_available_services = lambda type_name: [
        name for path in loader.search_paths if os.path.isdir(path) for name in os.listdir(path)
    ]
    return session


@functools.cache
def one_origin_session(redirect_hosts: tuple[str, ...]) -> Any:
    """Return a class of HTTP sessions of aiobotocore that follow redirects to no other origins than these.

    aiobotocore's own would send session tokens and keys of encryption there.
    """
    from aiobotocore.httpsession import AIOHTTPSession  # type: ignore[import-untyped]
    from aiohttp import ClientResponseError
    from botocore.exceptions import HTTPClientError

    class OneOriginSession(AIOHTTPSession):  # type: ignore[misc]
        async def _get_session(self, proxy_url: str | None) -> Any:
            session = await super()._get_session(proxy_url)
            session._response_class = bounded_session(redirect_hosts)["response_class"]
            if redirect_hosts and redirect_guard() not in session.trace_configs:
                session.trace_configs.append(redirect_guard())
            return session

        async def send(self, request: Any) -> Any:
            try:
                return await super().send(request)
            except HTTPClientError as error:
                refusal = error.kwargs.get("error")
                if isinstance(refusal, ClientResponseError) and not is_malformed(refusal):
                    raise refusal from error  # which is final; the other is tried again
                raise

    return OneOriginSession


def session_options(fs: Any, config: Any, scheme: str) -> SessionOptions:
    """Return the options of a session with the TLS of s3fs: its certificates, and the user's CA bundle.

    Args:
        config: configuration of the botocore client of `fs`.
        scheme: of its URLs; http needs no certificates, which take 20 ms to load.
    """
    from aiohttp import DummyCookieJar, TCPConnector
    from botocore.httpsession import create_urllib3_context, get_cert_path

    tls, verify = create_urllib3_context(), fs.client_kwargs.get("verify")
    if verify is False:
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    else:
        tls.check_hostname = True
        if scheme == "https":
            tls.load_verify_locations(get_cert_path(verify or fs.session.get_config_variable("ca_bundle") or True))
    if certificate := config.client_cert:
        tls.load_cert_chain(*([certificate] if isinstance(certificate, str) else certificate))
    # Servers close idle connections, some after 20 s; aiobotocore keeps them for 12 s.
    given = config.connector_args or {}
    connector = TCPConnector(**{"keepalive_timeout": 12, **given, "limit": 0, "ssl": tls})
    options = {"connector": connector, "cookie_jar": DummyCookieJar(), "auto_decompress": False}
    return SessionOptions(options, (lambda: tls) if given.keys() <= {"keepalive_timeout"} else None)
