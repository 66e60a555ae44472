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
    "accelerate": "how-to/train-with.html",
    "blend weights": "how-to/change-the-blend.html",
    "checkpoint": "tutorials/move-a-megatron-run.html",
    "credentials": "how-to/credentials.html",
    "csv": "reference/text-inputs.html",
    "curriculum": "how-to/change-the-blend.html",
    "dataloader stuck": "how-to/debug-slow-reads.html",
    "dedup": "how-to/tokenize-text.html",
    "epoch": "how-to/cyclic.html",
    "fsdp": "how-to/train-with.html",
    "hang": "how-to/debug-slow-reads.html",
    "huggingface": "how-to/train-with.html",
    "jupyter": "tutorials/look-at-data.html",
    "lightning": "how-to/train-with.html",
    "loss spike": "reference/commands/spikes.html",
    "multi node": "how-to/many-nodes.html",
    "nemo": "moving/megatron.html",
    "out of memory": "how-to/debug-slow-reads.html",
    "packing": "how-to/pack-documents.html",
    "permission denied": "how-to/permissions.html",
    "resume": "how-to/resume.html",
    "s3 credentials": "how-to/credentials.html",
    "shuffle": "how-to/shuffle.html",
    "shuffle seed": "how-to/shuffle.html",
    "slow": "how-to/debug-slow-reads.html",
    "slurm": "how-to/many-nodes.html",
    "torchtitan": "how-to/train-with.html",
    "upload": "how-to/back-up.html",
    "weights do not sum": "how-to/load-data.html",
}
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
    wrong = {query: pages for query, pages in found.items() if PAGES[query] not in pages}
    for query, pages in wrong.items():
        print(f"site search: {query!r} leads to {', '.join(pages) or 'nothing'}, needed {PAGES[query]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
