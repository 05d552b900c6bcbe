"""Feature maps of linear attention, over the last axis, by name.

With features phi >= 0, a sum of phi(q) . phi(k) can replace the sum of
exp(q . k) that attention's softmax divides by.
"""

from collections.abc import Callable

import jax

FEATURE_MAPS: dict[str, Callable[[jax.Array], jax.Array]] = {
  "elu": lambda x: jax.nn.elu(x) + 1,
  "relu": jax.nn.relu,
  "softmax": lambda x: jax.nn.softmax(x, axis=-1),
  "identity": lambda x: x,
}

NOT_NEGATIVE = ("elu", "relu", "softmax")
"""Names of the maps whose features are never negative."""
