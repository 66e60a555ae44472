"""Report of the counters of `stats` in one line, and as numbers for dashboards.

819,200 tokens in 4.10 s, waited 0.02 s (0.5%); 1,412 requests (2 retries, 1 hedge) moved 1.78 MB for 1.64 MB wanted
(1.09x); chunk cache 12% hits; requests $0.00056 at list price, $689.45 for 1e+12 tokens
"""

from __future__ import annotations

import logging
from typing import SupportsFloat

from binidx.errors import ConfigError
from binidx.storage.stats import AGAIN, CACHES, Usage, usage

PRICED_TOKENS = 100_000
"""Fewest served tokens from which the price of a run is extrapolated: of fewer, most requests opened the dataset."""


def report(run_tokens: float = 1e12) -> str:
    """Return a one-line report of all reads of this process.

    Args:
        run_tokens: tokens of the run for which the cost of the requests is extrapolated.

    Returns:
        Tokens, waiting time, requests, bytes, cache hits and cost; parts without a value are left out.

    Raises:
        ConfigError: `run_tokens` is no number.

    Example:
        print(binidx.report())

    Source: ours.
    """
    if not isinstance(run_tokens, SupportsFloat):
        way = "report() is of all reads of the process, loader.metrics() of a loader"
        raise ConfigError(f"run_tokens: found {run_tokens!r}, needs a number of tokens; {way}")
    return report_line(usage(), run_tokens)


def log_report(used: Usage) -> None:
    """Log the report of some counters to the logger "binidx" at INFO."""
    logging.getLogger("binidx").info("%s", report_line(used))


def report_line(used: Usage, run_tokens: float = 1e12) -> str:
    """Return a one-line report of some counters; parts without a value are left out.

    Args:
        used: counters of `usage`.
        run_tokens: tokens of the run for which the cost of the requests is extrapolated.
    """
    parts = [part(used) for part in (served_part, reads_part, throttled_part, filled_part)]
    parts += [*caches_parts(used), cost_part(used, run_tokens)]
    return "; ".join(filter(None, parts)) or "nothing was read"


def served_part(used: Usage) -> str:
    if not used["samples"]:
        return ""
    what = "tokens" if used["tokens"] else "samples"
    share = used["wait_seconds"] / used["seconds"] if used["seconds"] else 0.0
    waited = f"waited {used['wait_seconds']:,.2f} s ({share:.1%})"
    ahead = f", {used['samples_ahead']:,.0f} samples read ahead" if used["samples_ahead"] > 0 else ""
    return f"{used[what]:,.0f} {what} in {used['seconds']:,.2f} s, {waited}{ahead}"


def reads_part(used: Usage) -> str:
    """Return requests, moved bytes, and bytes requested of the topmost readers, some of which came from caches.

    The ratio is overhead: gaps between ranges and repeated requests, but not the rest of chunks that a cache keeps.
    """
    requests, moved = used["remote requests"], used["remote bytes_moved"]
    if not requests:
        return f"{bytes_text(used['local bytes_asked'])} from local files" if used["local bytes_asked"] else ""
    repeated = {name: used[f"remote {name}"] for name in AGAIN}
    again = ", ".join(counted(count, AGAIN[name], name) for name, count in repeated.items() if count)
    wanted = used["remote bytes_asked"] - used["layers added"]
    sent = counted(requests, "request", "requests") + (f" ({again})" if again else "")
    kept = max(0.0, used["caches added"])
    ratio = f" ({moved / (wanted + kept):.2f}x)" if wanted > 0 else ""
    cached = f" and {bytes_text(kept)} more cached" if kept else ""
    return f"{sent} moved {bytes_text(moved)} for {bytes_text(wanted)} wanted{cached}{ratio}"


def throttled_part(used: Usage) -> str:
    """Return for how long the store throttled this process, and the rates of the node in that time."""
    if not (seconds := used["throttled_seconds"]):
        return ""
    served, allowed = used["throttled_served"] / seconds, used["throttled_allowed"] / seconds
    alone = " (each process by itself)" if used["throttled_alone"] else ""
    return f"throttled {seconds:,.1f} s at {served:,.0f} requests/s of {allowed:,.0f} sent{alone}"


def filled_part(used: Usage) -> str:
    """Return the extents and bytes that filled the disk cache in the background."""
    extents = counted(used["filled extents"], "extent", "extents")
    return f"filled {extents}, {bytes_text(used['filled bytes'])}" if used["filled extents"] else ""


def caches_parts(used: Usage) -> list[str]:
    """Return the hit rate of each cache."""
    chunks = {cache: used[f"{cache} hits"] + used[f"{cache} misses"] for cache in CACHES}
    return [f"{CACHES[cache]} {used[f'{cache} hits'] / count:.0%} hits" for cache, count in chunks.items() if count]


def cost_part(used: Usage, run_tokens: float) -> str:
    """Return the list price of the requests, and of a run of `run_tokens` tokens at the same rate."""
    if not (dollars := used["dollars"]):
        return ""
    of_run = ""
    if used["tokens"] >= PRICED_TOKENS:
        read = used["tokens"] * (1 + max(0.0, used["samples_ahead"]) / used["samples"])
        of_run = f", ${dollars / read * run_tokens:,.2f} for {run_tokens:.3g} tokens"
    return f"requests ${dollars:.2g} at list price{of_run}"


def counted(count: float, one: str, many: str) -> str:
    return f"{count:,.0f} {one if count == 1 else many}"


def bytes_text(count: float) -> str:
    """Format bytes in decimal units, as stores bill them: 1.64 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def sum_usage(used: Usage) -> dict[str, float]:
    """Return the counters of a process that dashboards show, by names without blanks; see `metrics`."""
    loaders = {name: used[name] for name in ("samples", "tokens", "samples_ahead", "seconds", "wait_seconds")}
    stores = {name: used[f"remote {name}"] for name in ("requests", *AGAIN, "bytes_moved")}
    caches = {f"{cache}_{count}": used[f"{cache} {count}"] for cache in CACHES for count in ("hits", "misses")}
    filled = {f"filled_{count}": used[f"filled {count}"] for count in ("extents", "bytes")}
    throttled = {name: used[name] for name in ("throttled_seconds", "throttled_allowed", "throttled_served")}
    wanted = max(0.0, used["remote bytes_asked"] - used["layers added"])
    sizes = {"bytes_wanted": wanted, "bytes_local": used["local bytes_asked"]}
    return {**loaders, **stores, **sizes, **caches, **filled, **throttled, "dollars": used["dollars"]}


def rates(sums: Usage) -> dict[str, float]:
    """Return the ratios of the counters of `sum_usage`; 0 where nothing happened."""

    def ratio(part: float, whole: float) -> float:
        return part / whole if whole else 0.0

    found = {cache: sums[f"{cache}_hits"] for cache in CACHES}
    hits = {f"{cache}_hit_rate": ratio(count, count + sums[f"{cache}_misses"]) for cache, count in found.items()}
    speed = ratio(sums["tokens"], sums["seconds"])
    limit, goodput = (ratio(sums[f"throttled_{name}"], sums["throttled_seconds"]) for name in ("allowed", "served"))
    throttled = {"request_limit": limit, "goodput": goodput}
    return {"tokens_per_second": speed, "wait_share": ratio(sums["wait_seconds"], sums["seconds"]), **hits, **throttled}
