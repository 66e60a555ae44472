"""Words that people type into the search of the site, and a page of its first results: `make lint`, after the build.

Runs the search worker of the built site in Node.js, over the built index.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

PAGES = {
    "503 slow down": "how-to/debug-slow-reads explanation/storage",
    "accelerate": "how-to/train-with",
    "access denied": "reference/errors how-to/credentials how-to/permissions",
    "anonymous": "how-to/credentials",
    "azure": "how-to/credentials",
    "batch size": "how-to/change-the-length",
    "blend weights": "how-to/change-the-blend",
    "cache_dir": "how-to/disk-cache",
    "checkpoint": "how-to/train-with how-to/resume",
    "compression": "how-to/compress",
    "corrupt": "reference/errors",
    "credentials": "how-to/credentials",
    "csv": "reference/text-inputs",
    "curriculum": "how-to/change-the-blend",
    "data_path": "tutorials/move-a-megatron-run moving/megatron",
    "dataloader stuck": "how-to/debug-slow-reads",
    "dedup": "how-to/tokenize-text",
    "deduplicate": "how-to/tokenize-text",
    "deepspeed": "how-to/train-with",
    "deterministic": "explanation/order",
    "disk full": "how-to/disk-cache",
    "docker": "how-to/install",
    "egress cost": "how-to/plan-a-run",
    "elastic": "how-to/resume",
    "endpoint_url": "how-to/credentials",
    "eod": "reference/tokenizers",
    "epoch": "how-to/cyclic",
    "fsdp": "how-to/train-with",
    "hang": "how-to/debug-slow-reads",
    "huggingface": "how-to/train-with how-to/tokenize-text",
    "jsonl.zst": "reference/text-inputs how-to/tokenize-text",
    "jupyter": "tutorials/look-at-data",
    "kubernetes": "how-to/many-nodes how-to/share-work",
    "license": "how-to/install",
    "lightning": "how-to/train-with",
    "litdata": "moving/litdata",
    "local disk": "how-to/disk-cache",
    "loss mask": "reference/datasets reference/masked-datasets",
    "loss spike": "reference/commands/spikes",
    "lustre": "explanation/storage",
    "mds": "how-to/bring-data-over moving/streaming",
    "merge datasets": "how-to/merge-prefixes reference/commands/merge",
    "minio": "how-to/credentials",
    "multi node": "how-to/many-nodes",
    "nemo": "moving/megatron",
    "nfs": "how-to/cluster-cache",
    "no such object": "reference/errors",
    "num_workers": "how-to/debug-slow-reads how-to/plan-a-run",
    "oom": "how-to/debug-slow-reads",
    "out of memory": "how-to/debug-slow-reads",
    "packing": "how-to/pack-documents",
    "parquet": "reference/text-inputs",
    "permission denied": "how-to/permissions",
    "preemption": "how-to/resume",
    "prefetch": "explanation/storage",
    "prometheus": "how-to/train-with how-to/on-call",
    "rate limit": "how-to/plan-a-run explanation/storage",
    "reproducible": "explanation/order",
    "requests per second": "how-to/plan-a-run",
    "resume": "how-to/resume",
    "s3 credentials": "how-to/credentials",
    "sequence length": "how-to/change-the-length",
    "shuffle": "how-to/shuffle",
    "shuffle seed": "how-to/shuffle",
    "skip bad batch": "how-to/choose-an-order",
    "slow": "how-to/debug-slow-reads",
    "slurm": "how-to/many-nodes",
    "streaming": "moving/streaming",
    "timeout": "reference/errors reference/settings",
    "tokenizer": "reference/tokenizers how-to/tokenize-text",
    "torchtitan": "how-to/train-with",
    "truncated": "reference/errors",
    "upgrade": "reference/versions",
    "upload": "how-to/back-up",
    "validation split": "how-to/validate",
    "version": "reference/versions",
    "vocab size": "reference/tokenizers",
    "wandb": "how-to/train-with",
    "weights do not sum": "how-to/load-data",
    "windows": "how-to/install",
}
"""What people type -> the pages that answer it, one of which must be among the first results."""
NUM_RESULTS = 3
WORKER = """
const fs = require("fs"), [site, ...queries] = process.argv.slice(1), folder = site + "/assets/javascripts/workers/";
const code = fs.readFileSync(folder + fs.readdirSync(folder).find(name => /^search.*[.]js$/.test(name)), "utf8");
let hear, answer;
const listen = (_, call) => hear = call, post = message => answer(message);
const scope = {addEventListener: listen, postMessage: post, location: {href: ""}};
scope.self = scope.window = scope;
require("vm").runInNewContext(code, scope);
const send = (type, data) => new Promise(resolve => { answer = resolve; hear({data: {type, data}}); });
(async () => {
  const {config, docs} = JSON.parse(fs.readFileSync(site + "/search/search_index.json")), found = {};
  await send(0, {config, docs, options: {suggest: true}});
  for (const query of queries) found[query] = (await send(2, query)).data.items.map(item => item[0].location);
  console.log(JSON.stringify(found));
})();
"""


def first_pages(site: Path, queries: list[str]) -> dict[str, list[str]]:
    """Return for each query the pages of its first results."""
    done = subprocess.run(["node", "-e", WORKER, str(site), *queries], check=True, capture_output=True, text=True)
    return {
        query: [page.partition("#")[0] for page in pages[:NUM_RESULTS]]
        for query, pages in json.loads(done.stdout).items()
    }


def main(site: str) -> int:
    """Print the queries that lead elsewhere; return 1 if there are some."""
    if shutil.which("node") is None:
        print("site search: not checked, as Node.js is not installed")
        return 0
    found = first_pages(Path(site), list(PAGES))
    needed = {query: [f"{page}.html" for page in pages.split()] for query, pages in PAGES.items()}
    wrong = {query: pages for query, pages in found.items() if not {*pages} & {*needed[query]}}
    for query, pages in wrong.items():
        print(f"site search: {query!r} leads to {', '.join(pages) or 'nothing'}, needed {' or '.join(needed[query])}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
