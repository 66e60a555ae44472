"""Draw the golden table of batch schedules from Megatron-LM's own code: python draw_schedules.py MEGATRON_CHECKOUT.

The table is what Megatron-LM's main at d98e8a64ddf34856e74b24714e3bedb2f5a39553 counts. Its calculator of micro-batches
is imported from the checkout; of `megatron/training/training.py`, which needs a GPU to be imported, the statements that
count are cut out of the syntax tree and run here. Each line of `schedules.jsonl.gz` is a schedule:

    options      of the command line, and `restarts`: iterations at which the process begins anew
    train_iters, sizes          what `update_train_iters` and `get_train_valid_test_num_samples` return
    starts       of each process: iteration, consumed_train_samples, skipped_train_samples, samples consumed of the
                 dataset, samples of the dataset
    final        iteration, consumed_train_samples, skipped_train_samples at the end
    digest       md5 of both counters before each iteration, as text
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import importlib.util
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NUM_SCHEDULES = 1200
OUT = Path(__file__).with_name("schedules.jsonl.gz")


def cut(tree: ast.Module, function: str, first: str, last: str) -> Any:
    """Return as code the statements of one block of a function, from the one that begins with `first` to `last`."""
    (body,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    blocks = [
        block for node in ast.walk(body) for block in (getattr(node, "body", None), getattr(node, "orelse", None))
    ]
    for block in blocks:
        lines = [ast.unparse(statement) for statement in block] if isinstance(block, list) else []
        starts = [number for number, line in enumerate(lines) if line.startswith(first)]
        ends = [number for number, line in enumerate(lines) if line.startswith(last)]
        if starts and ends:
            return block[starts[0] : ends[0] + 1]
    raise LookupError(f"{function}: {first} ... {last}")


def as_code(statements: list[ast.stmt]) -> Any:
    return compile(ast.Module(statements, []), "megatron/training/training.py", "exec")


class Megatron:
    """Megatron's counters, one process after the other."""

    def __init__(self, checkout: Path) -> None:
        spec = importlib.util.spec_from_file_location(
            "calculator", checkout / "megatron/core/num_microbatches_calculator.py"
        )
        assert spec is not None
        assert spec.loader is not None
        self.calculator = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.calculator)
        tree = ast.parse((checkout / "megatron/training/training.py").read_text())
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        named = {node.name: node for node in functions}
        self.names: dict[str, Any] = {**vars(self.calculator), "print_rank_0": lambda text: None}
        self.names |= {"dummy_train_step": lambda iterator: None, "train_data_iterator": None, "iteration": 0}
        self.names["get_args"] = lambda: self.names["args"]
        self.names["_dp_world_size"] = lambda: self.names["args"].data_parallel_size
        whole = [named["update_train_iters"], named["get_train_valid_test_num_samples"]]
        exec(as_code([*whole]), self.names)
        skip = cut(
            tree, "train", "if iteration + 1 in args.iterations_to_skip", "if iteration + 1 in args.iterations_to_skip"
        )
        # The `continue` of the skipped iteration leaves the loop of one round that stands around it here.
        train = cut(
            tree, "train", "if args.perform_rl_step and args.rl_use_seq", "args.skipped_train_samples += num_skipped"
        )
        advance = ast.parse("iteration += 1").body
        rounds = ast.parse("for _ in range(1):\n    pass").body
        rounds[0].body = [*skip, *advance, *train]  # type: ignore[attr-defined]
        self.one_iteration = as_code(rounds)
        position = cut(
            tree, "build_train_valid_test_data_loaders", "if args.phase_transition_iterations", "if args.phase_tr"
        )
        self.find_position = as_code(position)

    def life(self, options: dict[str, Any], restarts: list[int]) -> dict[str, Any]:
        """Return the counters of a whole run."""
        args = SimpleNamespace(
            rampup_batch_size=None,
            step_batch_size_schedule=None,
            decrease_batch_size_if_needed=False,
            train_iters=None,
            full_validation=False,
            skip_train=False,
            start_eval_at_iter=None,
            perform_rl_step=False,
            rl_use_sequence_packing=False,
            eval_interval=10,
            eval_iters=2,
            consumed_train_samples=0,
            skipped_train_samples=0,
            iteration=0,
        )
        vars(args).update(options)
        if args.global_batch_size is None:
            args.global_batch_size = args.micro_batch_size * args.data_parallel_size
        args.eval_global_batch_size = args.global_batch_size
        self.names |= {"args": args, "iteration": 0, "start_iteration": 0}
        self.start(args)
        self.names["update_train_iters"](args)
        sizes = self.names["get_train_valid_test_num_samples"]()
        counters, starts = [], []
        stops = {*restarts, *(args.phase_transition_iterations or ())}
        while self.names["iteration"] < args.train_iters:
            args.iteration = self.names["iteration"]
            if not args.iteration or args.iteration in stops:
                self.start(args)
                exec(self.find_position, self.names)
                position = self.names["consumed_train_samples_in_current_phase"]
                counted = args.iteration, args.consumed_train_samples, args.skipped_train_samples
                starts.append([*counted, position, self.names["get_train_valid_test_num_samples"]()[0]])
            self.calculator.update_num_microbatches(args.consumed_train_samples, consistency_check=True)
            counters.append((args.consumed_train_samples, args.skipped_train_samples))
            exec(self.one_iteration, self.names)
        final = [self.names["iteration"], args.consumed_train_samples, args.skipped_train_samples]
        digest = hashlib.md5(repr(counters).encode()).hexdigest()
        return {"train_iters": args.train_iters, "sizes": sizes, "starts": starts, "final": final, "digest": digest}

    def start(self, args: SimpleNamespace) -> None:
        self.calculator.destroy_num_microbatches_calculator()
        self.calculator.init_num_microbatches_calculator(
            1,
            *(args.rampup_batch_size, args.global_batch_size, args.micro_batch_size, args.data_parallel_size),
            *(args.decrease_batch_size_if_needed, args.step_batch_size_schedule, args.seq_length),
        )


def draw_options(choose: random.Random) -> dict[str, Any]:
    """Return random options of a command line."""
    micro, ranks, length = choose.randrange(1, 5), choose.randrange(1, 5), choose.choice([1, 7, 128, 4096])
    block, kind = micro * ranks, choose.choice(["constant", "decrease", "steps"])
    options: dict[str, Any] = {"micro_batch_size": micro, "data_parallel_size": ranks, "seq_length": length}
    size = block * choose.randrange(1, 6) + (choose.randrange(block) if kind == "decrease" else 0)
    options["global_batch_size"] = size
    options["train_samples"] = size * choose.randrange(3, 120) + choose.randrange(size)
    if kind == "decrease":
        options["decrease_batch_size_if_needed"] = True
    if kind == "steps":
        options["global_batch_size"] = None
        samples = sorted(choose.sample(range(1, options["train_samples"]), choose.randrange(4)))
        texts = [thousands(choose, first * length + choose.randrange(length)) for first in samples]
        sizes = [block * choose.randrange(1, 9) for _ in range(len(samples) + 1)]
        pairs = [f"{text}:{size}" for text, size in zip(["0", *texts], sizes, strict=True)]
        options["step_batch_size_schedule"] = choose.choice([" ", ","]).join(pairs)
    steps = options["train_samples"] // size
    options["iterations_to_skip"] = sorted(choose.sample(range(1, steps + 1), min(steps, choose.choice([0, 0, 1, 5]))))
    phases = choose.sample(range(1, steps + 1), min(steps, choose.choice([0, 0, 1, 2, 3])))
    options["phase_transition_iterations"] = sorted(phases) or None
    return options


def thousands(choose: random.Random, tokens: int) -> str:
    return f"{tokens / 1000}K" if choose.random() < 0.5 else str(tokens)


def main() -> None:
    megatron, lines = Megatron(Path(sys.argv[1])), []
    seed = 0
    while len(lines) < NUM_SCHEDULES:
        choose, seed = random.Random(seed), seed + 1
        options = draw_options(choose)
        restarts = sorted(choose.randrange(1, 100) for _ in range(choose.choice([0, 1, 3])))
        try:
            drawn = megatron.life(options, restarts)
        except (AssertionError, ValueError):  # a schedule that Megatron refuses, such as two thresholds in one sample
            continue
        lines.append(json.dumps({"options": options, "restarts": restarts, **drawn}))
    OUT.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), 9, mtime=0))


main()
