"""binidx.native.permutations.torch_randperm against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from binidx.native import permutations
from binidx.native.permutations import _randperm

LIMIT = (2**32 - 1) // 20
UNSEEDED = 67280421310721


def torch_randperm(n: int, seed: int, dtype: torch.dtype = torch.int64) -> np.ndarray:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed), dtype=dtype).numpy()


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 5, 2**63 - 1, 2**64 - 1, -1, -(2**63)])
def test_permutes_as_torch_does(seed: int) -> None:
    for n in [0, 1, 2, 3, 623, 624, 625, 626, 1024, 1025, 1026, 5000]:
        assert (permutations.torch_randperm(n, seed) == torch_randperm(n, seed)).all()


def test_permutes_as_torch_does_at_random() -> None:
    rng = np.random.default_rng(1)
    for n, seed in zip(rng.integers(0, 3000, 1000), rng.integers(0, 2**63, 1000), strict=True):
        assert (permutations.torch_randperm(int(n), int(seed)) == torch_randperm(int(n), int(seed))).all()


def test_permutes_a_million_as_torch_does() -> None:
    assert (permutations.torch_randperm(1_000_000, 1234) == torch_randperm(1_000_000, 1234)).all()


def test_a_generator_nobody_seeded_has_torchs_own_seed() -> None:
    assert torch.Generator().initial_seed() == UNSEEDED
    assert (
        permutations.torch_randperm(999, UNSEEDED) == torch.randperm(999, generator=torch.Generator()).numpy()
    ).all()


def test_the_default_generator_draws_the_same() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(31)
        assert (permutations.torch_randperm(999, 31) == torch.randperm(999).numpy()).all()


def test_the_rule_of_64_bit_draws() -> None:
    """The rule on a small order, where torch does not use it; that it is torch's is shown at the limit below."""
    rng, order = np.random.RandomState(5), [0] * 2000
    for i in range(len(order)):
        high, low = (int(rng.randint(0, 2**32, dtype=np.uint32)) for _ in range(2))
        target = (high << 32 | low) % (i + 1)
        order[i], order[target] = order[target], i
    assert _randperm(len(order), 5, wide=True).tolist() == order


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("n", [LIMIT - 1, LIMIT, LIMIT + 1])
def test_changes_the_rule_where_torch_does(n: int) -> None:
    assert (permutations.torch_randperm(n, 9) == torch_randperm(n, 9, torch.int32)).all()


@pytest.mark.parametrize(
    ("n", "seed", "message"), [(-1, 0, "n: -1, needs 0 <= n"), (1, 2**64, "seed: 184467440737095")]
)
def test_refuses_what_torch_refuses(n: int, seed: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        permutations.torch_randperm(n, seed)
