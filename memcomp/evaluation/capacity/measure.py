"""Writes pairs directly into Tensor Cache's memory, and reads them back.

It uses `memcomp_kernels.tensor_cache` as in generation: a window of one token,
whose evicted tokens are written.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memcomp.evaluation import report
from memcomp_kernels import tensor_cache

_ROWS = 25
"""Number of parallel draws; more would not fit in memory."""


def written(
  keys: np.ndarray,
  values: np.ndarray,
  queries: np.ndarray,
  *,
  rule: str,
  decay: float,
  reads: int,
) -> np.ndarray:
  """Writes pairs into the memory, one per token, and reads it.

  Args:
    keys: `[rows, pairs, key]`.
    values: `[rows, pairs, value]`.
    queries: `[rows, pairs + reads, key]`; the query of token t reads the memory
      of the first min(t, pairs) pairs.
    rule: "outer", "delta" or "wedge".
    decay: lambda, in (0, 1].
    reads: number of tokens after the pairs, which write nothing.

  Returns:
    The reads, `[rows, pairs + reads, value]`, with eta = 1.
  """
  rows, pairs, dim = keys.shape
  spec = tensor_cache.Spec(
    window_size=1,
    rule=rule,
    write_population="evicted",
    read_after_write=True,
  )
  # Token t + 1 evicts token t, and so writes its pair.
  writes = np.arange(pairs + reads) <= pairs
  per_token = np.broadcast_to(
    writes[:, None, None], (rows, pairs + reads, 1, 1)
  ).astype(np.float32)

  def tokens(x):
    x = np.pad(x, ((0, 0), (0, pairs + reads - x.shape[1]), (0, 0)))
    return jnp.asarray(x[:, :, None], jnp.float32)

  inputs = tensor_cache.Inputs(
    query=tokens(queries),
    key=tokens(keys),
    value=tokens(values),
    log_decay=jnp.asarray(math.log(decay) * per_token),
    write_rate=jnp.asarray(per_token),
  )
  value_dim = values.shape[-1]
  state = tensor_cache.init_state(
    spec, batch=rows, heads=1, key_dim=dim, value_dim=value_dim
  )
  _, y = _chunk(state, inputs, spec=spec)
  return np.asarray(y[:, :, 0, value_dim:])


_chunk = jax.jit(tensor_cache.chunk, static_argnames=("spec",))


def draw(
  kind: str, dim: int, pairs: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
  """Draws keys and values of one row, float64 `[pairs, dim]`.

  Args:
    kind: "random" (unit vectors), or "orthogonal" (an orthonormal basis of
      `dim` vectors, then random).
    dim: dimension of keys and values.
    pairs: number of rows.
    rng: random generator.
  """
  keys = rng.standard_normal((pairs, dim))
  keys /= np.linalg.norm(keys, axis=1, keepdims=True)
  if kind == "orthogonal":
    basis, _ = np.linalg.qr(rng.standard_normal((dim, dim)))
    keys[:dim] = basis[:pairs]
  return keys, rng.standard_normal((pairs, dim))


def first(
  kind: str, dim: int, decay: float, *, seeds: int, seed: int
) -> dict[str, Any]:
  """Measures the capacity by the first pair; see `capacity.run`.

  Returns:
    `capacities` of all draws, their `mean` and `deviation` (None for one draw),
    and those of the first five draws; `never`, the number of draws that never
    passed 1 (they count as the maximum number of pairs); `errors`, the mean
    over draws by n, from 1; `theory`.
  """
  pairs = 6 * dim + 32
  found = []
  for keys, values in _batches(kind, dim, pairs, seeds, seed):
    queries = np.repeat(keys[:, :1], pairs + 1, axis=1)
    read = written(keys, values, queries, rule="outer", decay=decay, reads=1)[
      :, 1:
    ]
    left = decay ** np.arange(pairs)[:, None] * values[:, :1]
    error = np.linalg.norm(read - left, axis=2) / np.linalg.norm(left, axis=2)
    found.append(error)
  error = np.concatenate(found)
  over = error > 1
  capacities = np.where(over.any(axis=1), over.argmax(axis=1) + 1, pairs)
  return {
    "capacities": capacities.tolist(),
    "mean": float(capacities.mean()),
    "deviation": report.deviation(capacities),
    "mean_of_5": float(capacities[:5].mean()),
    "deviation_of_5": report.deviation(capacities[:5]),
    "never": int((~over.any(axis=1)).sum()),
    "errors": [round(float(x), 6) for x in error.mean(axis=0)],
    "theory": theory(kind, dim, decay),
  }


def theory(kind: str, dim: int, decay: float) -> float:
  """Number of pairs at which the first pair's expected squared error is 1.

  With g = decay^-2, pair i + 1 adds g^i / dim to it: it is i decays younger
  than the first. So n pairs make (g^n - g) / (g - 1) / dim.
  """
  if decay == 1:
    return float(2 * dim if kind == "orthogonal" else dim + 1)
  growth = decay**-2
  return math.log(growth + dim * (growth - 1)) / math.log(growth)


def everything(
  rule: str, dim: int, pairs: int, decay: float, *, seeds: int, seed: int
) -> dict[str, Any]:
  """Writes `pairs` by a rule and reads all of them; see `capacity.run`.

  Returns:
    `accuracy` and `error`, and their deviations over draws (None for one).
  """
  accuracies, found = [], []
  for keys, values in _batches("random", dim, pairs, seeds, seed):
    # The first read writes the last pair.
    queries = np.concatenate([np.zeros_like(keys), keys], axis=1)
    read = written(keys, values, queries, rule=rule, decay=decay, reads=pairs)
    read = read[:, pairs:].astype(np.float64)
    unit = values / np.linalg.norm(values, axis=2, keepdims=True)
    scores = np.einsum("rid,rjd->rij", read, unit)
    accuracies.append((scores.argmax(axis=2) == np.arange(pairs)).mean(axis=1))
    left = decay ** np.arange(pairs)[::-1, None] * values
    relative = ((read - left) ** 2).sum(axis=2) / (left**2).sum(axis=2)
    found.append(relative.mean(axis=1) ** 0.5)
  accuracy, error = np.concatenate(accuracies), np.concatenate(found)
  return {
    "accuracy": float(accuracy.mean()),
    "accuracy_deviation": report.deviation(accuracy),
    "error": float(error.mean()),
    "error_deviation": report.deviation(error),
  }


def _batches(kind, dim, pairs, seeds, seed):
  """Draws `seeds` rows in batches; row i depends only on (seed, i)."""
  for start in range(0, seeds, _ROWS):
    rows = [
      draw(kind, dim, pairs, np.random.default_rng((seed, i)))
      for i in range(start, min(start + _ROWS, seeds))
    ]
    yield tuple(np.stack(x) for x in zip(*rows, strict=True))
