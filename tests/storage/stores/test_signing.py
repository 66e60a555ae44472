"""URLs of a bucket, made of botocore's URL of one object."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from types import MappingProxyType
from urllib.parse import parse_qsl, urlsplit

from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials
from hypothesis import given
from hypothesis import strategies as st

from binidx.storage.stores.signing import UrlSigner, derive_signer

HOST, QUERY = (
    "https://examplebucket.s3.amazonaws.com/",
    (
        "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20130524%2Fus-east-1%2Fs3%2Faws4_request"
        "&X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400&X-Amz-SignedHeaders=host"
    ),
)
CREDENTIALS = ReadOnlyCredentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", None)


def test_a_url_is_the_example_of_the_s3_reference() -> None:
    signature = "aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"
    url = f"{HOST}test.txt?{QUERY}&X-Amz-Signature={signature}"
    assert UrlSigner(None, HOST, QUERY, CREDENTIALS).make_url("test.txt") == url


@given(first=st.text(min_size=1), second=st.text(min_size=1), token=st.sampled_from([None, "a/b+c=="]))
def test_urls_are_those_of_botocore(first: str, second: str, token: str | None) -> None:
    credentials = ReadOnlyCredentials("k", "s", token)
    signer = None
    for key in (first, second):
        url = sign_by_botocore(key, credentials)
        signer = signer or derive_signer(None, credentials, url, key)
        assert signer is not None
        if date_of(url) == date_of(f"?{signer.query}"):
            assert signer.make_url(key) == url


@given(key=st.text(min_size=1), part=st.integers(1, 10_000), checksum=st.binary(min_size=4, max_size=4))
def test_requests_with_fields_and_headers_are_signed_as_by_botocore(key: str, part: int, checksum: bytes) -> None:
    credentials = ReadOnlyCredentials("k", "s", "a/b+c==")
    headers = {"x-amz-checksum-crc32": b64encode(checksum).decode(), "x-amz-copy-source": "b/%20"}
    signer = derive_signer(None, credentials, sign_by_botocore(key, credentials), key)
    fields = f"partNumber={part}&uploadId=a~b"
    url = sign_by_botocore(key, credentials, "PUT", f"?{fields}", headers)
    assert signer is not None
    if date_of(url) == date_of(f"?{signer.query}"):
        ours = signer.make_url(key, "PUT", fields, {**headers, "Content-Length": "5"})
        assert sorted(parse_qsl(urlsplit(ours).query)) == sorted(parse_qsl(urlsplit(url).query))


def test_no_signer_is_made_of_a_url_that_it_would_not_make() -> None:
    url = sign_by_botocore("key", ReadOnlyCredentials("k", "s", None))
    assert derive_signer(None, ReadOnlyCredentials("k", "other", None), url, "key") is None
    assert derive_signer(None, None, url, "key") is None
    assert derive_signer(None, ReadOnlyCredentials("k", "s", None), url, "another") is None


def test_the_urls_of_a_public_bucket_are_not_signed() -> None:
    signer = derive_signer(None, None, f"{HOST}a%20b", "a b")
    assert signer is not None
    assert signer.make_url("c/ä") == f"{HOST}c/%C3%A4"


def sign_by_botocore(
    key: str,
    credentials: ReadOnlyCredentials,
    method: str = "GET",
    query: str = "",
    headers: Mapping[str, str] = MappingProxyType({}),
) -> str:
    from botocore.utils import percent_encode

    url = "http://127.0.0.1:9/bucket/" + percent_encode(key, safe="/~") + query
    request = AWSRequest(method, url, headers=dict(headers))
    S3SigV4QueryAuth(credentials, "s3", "us-east-1", expires=3600).add_auth(request)
    return str(request.url)


def date_of(url: str) -> str:
    return next(part for part in urlsplit(url).query.split("&") if part.startswith("X-Amz-Date"))
