"""URLs of objects on the tests' S3 server that carry a signature, as people hand them on."""

from __future__ import annotations

import boto3
from botocore.config import Config
from conftest import Bucket

MARKS = ("X-Amz-Signature", "X-Amz-Credential", "5ec4e7")
"""What no text may have of them: the names, and the password of `with_user`."""


def signed(uri: str, seconds: int = 3600) -> str:
    """A URL that whoever has it may read the object by, of the server that the environment names."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    client = boto3.client("s3", config=Config(signature_version="s3v4"))
    url: str = client.generate_presigned_url("get_object", {"Bucket": bucket, "Key": key}, seconds)
    return url


def with_user(url: str) -> str:
    """With a user and a password, too."""
    return url.replace("://", "://me:5ec4e7@", 1)


def put_signed(s3: Bucket, name: str, data: bytes) -> str:
    """A new object and its signed URL."""
    import fsspec

    uri = f"{s3.fresh()}/{name}"
    fs, path = fsspec.url_to_fs(uri)
    fs.pipe_file(path, data)
    return with_user(signed(uri))


def secrets_in(text: str) -> list[str]:
    """Those of the marks that it has."""
    return [mark for mark in MARKS if mark.lower() in text.lower()]
