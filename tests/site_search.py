"""Words that people type into the search of the site, and the page that must come first: `make lint`, after the build.

Runs the search worker of the built site in Node.js, over the built index.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

FIRST = {
    "loss spike": "reference/commands/spikes.html",
    "jupyter": "how-to/find-documents.html",
    "huggingface": "how-to/train-with.html",
    "weights do not sum": "how-to/load-data.html",
    "slurm": "how-to/many-nodes.html",
    "csv": "reference/text-inputs.html",
    "resume": "how-to/resume.html",
    "shuffle": "how-to/shuffle.html",
    "credentials": "how-to/credentials.html",
}
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


def first_pages(site: Path, queries: list[str]) -> dict[str, str]:
    """Return for each query the page of its first result; "" if there is none."""
    done = subprocess.run(["node", "-e", WORKER, str(site), *queries], check=True, capture_output=True, text=True)
    found = {query: (pages or [""])[0] for query, pages in json.loads(done.stdout).items()}
    return {query: page.partition("#")[0] for query, page in found.items()}


def main(site: str) -> int:
    """Print the queries that lead elsewhere; return 1 if there are some."""
    if shutil.which("node") is None:
        print("site search: not checked, as Node.js is not installed")
        return 0
    found = first_pages(Path(site), list(FIRST))
    wrong = {query: page for query, page in found.items() if page != FIRST[query]}
    for query, page in wrong.items():
        print(f"site search: {query!r} leads to {page or 'nothing'}, needed {FIRST[query]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
