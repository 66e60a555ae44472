"""python -m binidx.compat.megatron [OPTIONS] SCRIPT ARGS...

Run a training script of Megatron-LM with binidx's datasets instead of
Megatron's. Under torchrun:

    torchrun --nproc-per-node 8 -m binidx.compat.megatron \\
        pretrain_gpt.py --data-path s3://corpus/en ...

--trust-cache                accept indices that Megatron left:
                             trust_cache="megatron" of the config
--cache-small-indices        also cache indices of less than 2^15 documents and
                             samples, for Megatron to find
--megatron-samples=RELEASE   serve the samples of this release of Megatron, such
                             as 0.16 or main; by default the installed one's
"""

from __future__ import annotations

import os
import sys

from binidx.compat.megatron.script import run
from binidx.compat.megatron.serve import install
from binidx.errors import ConfigError, MissingDriverError

SAMPLES = "--megatron-samples="
OPTIONS = ("--trust-cache", "--cache-small-indices", f"{SAMPLES}RELEASE")


def main(arguments: list[str]) -> int:
    given: list[str] = []
    while arguments and (arguments[0] in OPTIONS or arguments[0].startswith(SAMPLES)):
        given.append(arguments.pop(0))
    asked = arguments[:1] in (["-h"], ["--help"])
    if asked or not arguments:
        print(__doc__, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    if arguments[0].startswith("-"):
        print(f"{arguments[0]}: unknown option; needs one of {', '.join(OPTIONS)}", file=sys.stderr)
        return 2
    if not os.path.isfile(arguments[0]):
        print(f"{arguments[0]}: no such script; give the path of a training script", file=sys.stderr)
        return 2
    try:
        install(
            trust_cache="megatron" if "--trust-cache" in given else None,
            cache_small_indices="--cache-small-indices" in given,
            megatron_samples=next((word.removeprefix(SAMPLES) for word in given if word.startswith(SAMPLES)), None),
        )
    except (ConfigError, MissingDriverError) as error:
        print(f"{arguments[0]}: {error}", file=sys.stderr)
        return 2
    sys.argv = arguments
    run(arguments[0])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
