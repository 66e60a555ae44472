"""URIs as they may be written down or said: without the passwords and signatures that some carry.

https://user:password@host/en.jsonl                       https://host/en.jsonl
https://bucket.host/en.jsonl?X-Amz-Signature=...&part=2   https://bucket.host/en.jsonl?part=2

Every error of ours goes through `redacted_text`, drivers' words in it too.
"""

from __future__ import annotations

import re

SECRETS = re.compile(
    r"x-(amz|goog|oss)-.*|.*(signature|token|secret|password|credential).*|.*api_?key|key|auth.*|policy|expires"
    r"|(aws|oss)accesskeyid|googleaccessid|key-pair-id|sig|s[evprst]|sdd|sip|spr|srt|sk(oid|tid|t|e|s|v)",
    re.IGNORECASE,
)
"""Names in a query that sign it or grant access. Source: signed URLs of S3, GCS, OSS and CloudFront; Azure's SAS."""


def redacted(uri: str) -> str:
    """Equal for two URLs of the same object that were signed at different times; a path stays as it is."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return uri
    authority, slash, path = rest.partition("/")
    path, mark, query = path.partition("?") if scheme in ("http", "https") else (path, "", "")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}{_without_secrets(query) if mark else ''}"


def redacted_text(text: str) -> str:
    """Words with URLs in them: from the first of HTTP on no query keeps what signs or grants."""
    text = USER.sub("", text)
    start = URL.search(text)
    if start is None:
        return text
    # To the end of the text, not of the URL: where that has a space in its path nobody can tell its end.
    return text[: start.start()] + QUERY.sub(lambda found: _without_secrets(found[1]), text[start.start() :])


USER = re.compile(r"""(?<=://)[^/\s'"]*@""")
URL = re.compile(r"https?://", re.IGNORECASE)
QUERY = re.compile(r"""\?([^#\s'"<>]+?)(?=[]):;,.?}]*(?:[#\s'"<>]|$))""")
"""Up to the punctuation behind it."""


def _without_secrets(query: str) -> str:
    """With its question mark, if anything is left."""
    told = [each for each in query.split("&") if each and not SECRETS.fullmatch(each.partition("=")[0])]
    return f"?{'&'.join(told)}" if told else ""
