"""How a convert is to store what it reads.

source       target            what is sent                                   after a break
.bin         .bin              its bytes                                      goes on
.bin.zst     .bin.zst          its bytes; with a level they are packed anew   goes on; packed anew
.bin.zst     .bin   (plain)    the plain bytes                                goes on
.bin         .bin.zst          the plain bytes, compressed on the way         compressed anew
.bin.xxh3    .bin.xxh3         its bytes, or sums of what was sent            goes on; summed anew
"""

from __future__ import annotations

from dataclasses import dataclass

from binidx.errors import ConfigError
from binidx.storage.segment_writer import check_level


@dataclass(frozen=True)
class Way:
    """How tokens are to be stored.

    Attributes:
        codec: a row of `segments.CODECS`; None: as at the source.
        level: of compression; None: the codec's own, and what is compressed already stays as it is.
        checksums: whether sums are to be taken; they come along in any case where the source has some.
    """

    codec: str | None = None
    level: int | None = None
    checksums: bool = False

    def check(self) -> None:
        """ConfigError where these contradict each other."""
        if self.level is not None:
            check_level(self.level)
        if self.level is not None and self.codec != "zstd":
            raise ConfigError(f"compression level {self.level}: needed to compress, or no level")
        if self.checksums and self.codec == "zstd":
            raise ConfigError("checksums: needed a plain .bin; each compressed segment has its own")


def check_call(source: str, target: str, way: Way, verify: str) -> None:
    """ConfigError for what can be told before anything is opened."""
    way.check()
    if verify not in ("checksum", "size"):
        raise ConfigError(f"verify: {verify!r}, needed 'checksum' or 'size'")
    if target.endswith("/"):
        raise ConfigError(f"{target}: a folder, needed a prefix such as {target}{source.rstrip('/').split('/')[-1]}")
