"""Files of the Hugging Face Hub: hf://datasets/NAME/PATH, hf://datasets/NAME@REVISION/PATH, also of models and spaces.

Read only, as the URLs behind them (`HttpStore`): ranges are pinned to the ETag, and the token stays with the Hub when
it redirects to another host for the bytes. huggingface_hub makes the URLs, finds the token and lists repositories.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from binidx.storage.settings import drivers_own
from binidx.storage.store_protocols import Driver, Prices
from binidx.storage.stores.driver_errors import storage_errors
from binidx.storage.stores.fsspec_store import open_filesystem
from binidx.storage.stores.http import HttpStore

FILE = re.compile(r"hf://(?:(dataset|space)s/)?([^/@]+/[^/@]+)(?:@(refs/\w+/[^/]+|[^/]+))?/(.+)")


class HubStore(HttpStore):
    """Store of the files of the Hugging Face Hub.

    Options are those of huggingface_hub's HfFileSystem: `endpoint` (HF_ENDPOINT), `token` (HF_TOKEN, or that of the
    login; False: none).
    """

    list_prices = Prices("hf")
    driver = Driver("huggingface_hub", "'binidx[hub]'", "HF_TOKEN, or hf auth login")

    def __init__(self, uri: str, storage_options: Mapping[str, Any] | None = None) -> None:
        with storage_errors(uri):
            import aiohttp  # noqa: F401
            from huggingface_hub import constants, get_token
        self._given = uri, dict(storage_options or {})
        options = drivers_own(self._given[1])
        self._endpoint = str(options.get("endpoint") or constants.ENDPOINT)
        token = options.get("token")
        token = get_token() if token in (None, True) else token
        ours = {name: value for name, value in self._given[1].items() if name not in options}
        super().__init__(self._endpoint, {**ours, "headers": {"Authorization": f"Bearer {token}"} if token else {}})

    @staticmethod
    def default_options(uri: str, given: Mapping[str, Any], reading: int) -> dict[str, Any]:
        return dict(given)

    def path(self, uri: str) -> str:
        from huggingface_hub import hf_hub_url

        if (parts := FILE.fullmatch(uri)) is None:
            raise FileNotFoundError(uri)
        kind, repository, revision, path = parts.groups()
        return str(hf_hub_url(repository, path, repo_type=kind, revision=revision, endpoint=self._endpoint))

    def find(self, uri: str, *, pattern: bool) -> list[str]:
        fs, path = open_filesystem(uri, self._given[1])
        with storage_errors(uri):
            return [f"hf://{name}" for name in (fs.glob(path) if pattern else fs.find(path))]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._given
