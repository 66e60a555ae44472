"""Only who has the token reads the pages, and no text of a document becomes part of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.explored import HOSTILE, TOKEN, PageServer, read_html, served, write_run

from binidx.explore.app import HIDDEN
from binidx.explore.explored import Explored


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    folder = tmp_path_factory.mktemp("run")
    (folder / "outside.txt").write_text("not of the run")
    options = {"key": "ACCESS-KEY", "secret": "SECRET-KEY"}
    with served(Explored.open(write_run(folder), options)) as server:
        yield server


ALL = ["", "step/3", "step/3/1/0", "source/0", "source/1/lengths", "source/0/tokens", "source/0/document/2",
       "source/0/document/2/reads", "repeats", "nowhere", "step/99999", "?steps=x"]  # fmt: skip


def test_without_the_token_nothing_is_shown(pages: PageServer) -> None:
    for path in ("/", "/assets/explore.css", *(f"/{pages.digest}/{path}" for path in ALL)):
        for cookie in ("", f"{pages.cookie}=wrong", f"other={TOKEN}", f"{pages.cookie}=tök"):
            status, _, text = pages.get(path, cookie=cookie.encode().decode("latin-1"))
            assert (status, text.count("\n")) == (403, 1), path
    assert pages.get("/?token=wrong", cookie="")[0] == 403


def test_the_token_becomes_a_cookie_and_leaves_the_address(pages: PageServer) -> None:
    status, headers, text = pages.get(f"/{pages.digest}/step/3?rank=1&token={TOKEN}", cookie="")
    assert status == 200
    assert headers["refresh"] == "0; url=./3?rank=1"
    assert {"HttpOnly", "SameSite=strict"} <= set(headers["set-cookie"].split("; "))
    assert TOKEN not in text


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[", "evil.example:80"])
def test_a_name_that_an_attacker_points_here_is_refused(host: str, pages: PageServer) -> None:
    assert pages.get(f"/{pages.digest}/", host=host)[0] in (400, 421)


def test_an_allowed_host_is_served(pages: PageServer) -> None:
    assert pages.get(f"/{pages.digest}/", host="proxy.example:443")[0] == 200


def test_a_request_of_another_page_is_refused(pages: PageServer) -> None:
    path = f"/{pages.digest}/step/3.json"
    for site in ("cross-site", "same-site"):
        assert pages.get(path, sec_fetch_site=site, sec_fetch_mode="no-cors")[0] == 403
    assert pages.get(path, sec_fetch_site="same-origin", sec_fetch_mode="cors")[0] == 200
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert pages.get(path, method)[0] == 405


def test_every_response_forbids_scripts_frames_copies_and_referrers(pages: PageServer) -> None:
    for path in ("/", "/nowhere", f"/?token={TOKEN}", *(f"/{pages.digest}/{path}" for path in ALL)):
        _, headers, _ = pages.get(path)
        policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
        assert (policy["default-src"], policy["script-src"], policy["frame-ancestors"]) == (
            "'none'",
            "'self'",
            "'none'",
        )
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"


def test_no_page_has_inline_scripts_or_styles_or_foreign_addresses(pages: PageServer) -> None:
    for path in ALL:
        text = pages.get(f"/{pages.digest}/{path}")[2]
        for tag, attributes in read_html(text).tags:
            assert not [name for name in attributes if name.startswith("on") or name == "style"]
            assert tag != "script" or set(attributes) == {"src", "defer"}
            addresses = [attributes.get(name) or "" for name in ("src", "href", "action") if name in attributes]
            assert not [address for address in addresses if ":" in address.partition("?")[0] or "//" in address]


def test_hostile_text_is_shown_and_is_no_markup(pages: PageServer) -> None:
    for token, word in enumerate(HOSTILE, 1):
        reader = read_html(pages.page(f"source/0/document/{pages.document_with(token)}"))
        assert not [attributes for tag, attributes in reader.tags if tag in ("img", "svg") and "src" in attributes]
        assert [tag for tag, _ in reader.tags].count("script") == 1
        assert word.translate(HIDDEN) in "".join(reader.texts)


@pytest.mark.parametrize(
    "path",
    ["/../outside.txt", "/assets/../../outside.txt", "/assets/%2e%2e%2foutside.txt", "/assets/explore.py",
     "/etc/passwd", "/{digest}/source/-1", "/{digest}/source/0/document/-1", "/{digest}/step/1.exe",
     "/{digest}/source/9", "/{digest}/step/1?rank=-1", "/{digest}/source/0?from=99999999999999999999",
     "/{digest}/find?document=%2Fetc%2Fpasswd:x"],
)  # fmt: skip
def test_paths_outside_the_run_are_not_found(path: str, pages: PageServer) -> None:
    status, _, text = pages.get(path.replace("{digest}", pages.digest))
    assert status == 404
    assert "not of the run" not in text


def test_no_page_has_a_credential_or_a_traceback(pages: PageServer) -> None:
    for path in ALL:
        text = pages.get(f"/{pages.digest}/{path}")[2]
        assert not re.search(r"ACCESS-KEY|SECRET-KEY|Traceback|token-of-the-tests|File &#34;", text)


def test_a_fault_shows_its_kind_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    with served(Explored.open(run)) as server:
        (tmp_path / "en.bin").unlink()
        (tmp_path / "en.lineage.parquet").write_bytes(b"no parquet")
        status, _, text = server.get(f"/{server.digest}/source/0/document/1")
        assert status == 500
        assert "lineage" in text
        assert "Traceback" not in text
