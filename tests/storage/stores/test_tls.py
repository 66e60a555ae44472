"""TLS of direct requests to S3: the certificates that s3fs is told to trust are those that hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers.http_objects import Server, http_objects, write_certificate

from binidx.errors import StorageError
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import RemoteObject
from binidx.storage.store_protocols import ObjectInfo
from binidx.storage.stores.direct import DirectStore

DATA = bytes(range(250)) * 400


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1, signed by itself, with its key in the same file."""
    return write_certificate(tmp_path_factory.mktemp("tls") / "server.pem")


@pytest.fixture
def server(certificate: Path) -> Iterator[Server]:
    with http_objects({"/b/k": DATA}, certificate=certificate) as found:
        yield found


def open_by(server: Server, info: ObjectInfo | None = None, **client: Any) -> RemoteObject:
    options = {"endpoint_url": server.endpoint, "key": "k", "secret": "s", "client_kwargs": client}
    return RemoteObject(Location.of("s3://b/k", options), info=info)


def check_direct(reader: RemoteObject) -> None:
    """Check that a range is right, and was not left to the driver."""
    assert bytes(reader.read([(7, 90)])[0]) == DATA[7:90]
    assert isinstance(reader.location.store, DirectStore)
    assert reader.location.store.route(reader.info).address is not None


def test_a_ca_bundle_of_the_options_holds(server: Server, certificate: Path) -> None:
    check_direct(open_by(server, verify=str(certificate.with_suffix(".crt"))))


def test_a_ca_bundle_of_the_environment_holds(
    server: Server, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate.with_suffix(".crt")))
    check_direct(open_by(server))


def test_certificates_are_not_checked_if_the_user_says_so(server: Server) -> None:
    check_direct(open_by(server, verify=False))


def test_an_unknown_certificate_is_refused(server: Server) -> None:
    info = open_by(server, verify=False).info
    num_requests = len(server.requests)
    with pytest.raises(StorageError, match="CERTIFICATE_VERIFY_FAILED"):
        open_by(server, region_name="us-east-1")
    with pytest.raises(StorageError, match="CERTIFICATE_VERIFY_FAILED"):
        open_by(server, info, region_name="us-east-1").read([(7, 90)])
    assert len(server.requests) == num_requests
