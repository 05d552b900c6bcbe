"""What a call costs, against counting token by token."""

import pytest

from memcomp_kernels import facts, softmax_attention


def counted(n: int, window: int, chunk: int) -> float:
  """Tokens that each of `n` tokens sees, in the mean, one after the other."""
  firsts = (max(0, (p // chunk + 1) * chunk - window) for p in range(n))
  return sum(p + 1 - first for p, first in enumerate(firsts)) / max(n, 1)


@pytest.mark.parametrize("chunk", [1, 3, 4])
def test_tokens_seen(chunk):
  for window in range(chunk, 20, chunk):
    for n in range(40):
      found = facts.tokens_seen(n, window, chunk)
      assert found == pytest.approx(counted(n, window, chunk)), (n, window)


def test_a_window_that_moves_by_chunks_costs_less():
  spec = softmax_attention.Spec(window_size=64, chunk_size=64)
  letters = softmax_attention.facts(spec).letters(10_000)
  assert letters["w"] == pytest.approx(counted(10_000, 64, 64))
  assert letters["w"] < 33
