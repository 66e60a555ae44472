"""Show a run, or a dataset alone, in a browser: steps, samples, documents, sources, with text.

RUN is what binidx.Run.save wrote; a prefix shows a dataset. The pages are read-only, on this machine alone, and only
for those who have the printed address, which contains a token. Text is decoded by --tokenizer, else by the tokenizer in
the manifest beside the data. Indices are read by ranges; an index without a cache is built.

--html writes the first page as one file that opens without a server. --loss takes a CSV file with a column "step" and a
column that ends in "loss" or is "value", as TensorBoard and W&B export them; TensorBoard's event file, or the folder of
some; or the folder of the losses of samples that loader.record_losses wrote, of a history one for all runs or, the
earliest first, one --loss for each. Step 0 is Megatron's iteration 1: --loss-first 1. Behind a proxy or a tunnel of
another name give that name with --allow-host.

exit status: 0 done, 1 the data is bad, 2 the call is wrong

example:
  binidx explore run.json --loss loss.csv
  binidx explore s3://corpus/en --html report.html
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import sys
import threading

from binidx.errors import ConfigError, MissingDriverError

from ._command import Command
from ._options import add_json
from ._run_options import add_text_tokenizer


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_argument("run", metavar="RUN", help="file of a run, or prefix of a dataset; path or URI")
    add_text_tokenizer(options, "of the text")
    options.add_argument("--loss", metavar="URI", action="append", help="losses: .csv or event file, or folder")
    options.add_argument("--loss-first", type=int, default=0, metavar="N", help="its number of step 0 (0)")
    options.add_argument("--compare", metavar="RUN", help="another run, to compare documents")
    options.add_argument("--html", metavar="FILE", help="write the first page into a file instead")
    options.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    options.add_argument("--port", type=int, default=8765, help="0: any free port (8765)")
    options.add_argument("--allow-host", action="append", default=[], metavar="NAME", help="name of a proxy, too")
    add_json(options, "--storage-options", "fsspec's own, for RUN and its data")


def explore(arguments: argparse.Namespace) -> None:
    """Write the report, or serve the pages until an interrupt."""
    try:
        from binidx.explore.app import build_app, build_server, listen, write_report
        from binidx.explore.explored import Explored
    except ModuleNotFoundError as error:
        raise MissingDriverError(f"explore: needs {error.name}; pip install 'binidx[explore]'") from error

    from ._runs import write_text

    more = (arguments.tokenizer, arguments.loss or (), arguments.compare, arguments.loss_first)
    explored = Explored.open(arguments.run, arguments.storage_options, *more)
    if arguments.html:
        write_text(arguments.html, write_report(explored), arguments.storage_options)
        return
    try:
        socket = listen(arguments.host, arguments.port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or "no port has this number"
        raise ConfigError(f"port: {arguments.host}:{arguments.port}: {reason}; give another, or 0") from error
    port, token = socket.getsockname()[1], secrets.token_urlsafe(24)
    hosts = ["127.0.0.1", "localhost", "::1", arguments.host, *arguments.allow_host]
    address = f"http://{f'[{arguments.host}]' if ':' in arguments.host else arguments.host}:{port}/?token={token}"
    print(json.dumps({"address": address}) if arguments.json else address, flush=True)
    print("Ctrl-C ends it", file=sys.stderr)
    threading.Thread(target=explored.warm, name="binidx-explore-warm", daemon=True).start()
    server = build_server(build_app(explored, token, hosts, f"binidx-{port}"))
    serving = threading.Thread(target=server.run, args=([socket],), daemon=True)
    serving.start()
    with contextlib.suppress(KeyboardInterrupt):
        serving.join()
        os._exit(1)  # its error has been printed
    os._exit(0)  # the threads of a request that is in flight would be waited for


main = Command("explore", __doc__, add_options, explore)
