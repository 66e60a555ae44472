"""URIs as they may be written down: without the passwords and signatures that some carry.

https://user:password@host/en.jsonl                       https://host/en.jsonl
https://bucket.host/en.jsonl?X-Amz-Signature=...&part=2   https://bucket.host/en.jsonl?part=2
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
    told = [each for each in query.split("&") if each and not SECRETS.fullmatch(each.partition("=")[0])]
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}{mark if told else ''}{'&'.join(told)}"
