"""Custom gradients: a `jax.custom_vjp` that works in any caller's program.

It differs from JAX's in two ways. First, its functions are traced under JAX's
default promotion, whatever setting the caller's program uses. They need this
because JAX traces a backward pass outside of the call that it belongs to.
Second, forward-mode differentiation, which such functions do not have, raises
an error that says what to do. So does a second derivative that does not exist
(see `only_first`).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from memcomp_kernels import contract

REFUSAL = (
  "memcomp_kernels: forward-mode differentiation (jax.jvp, jax.jacfwd) is not"
  " supported here; use reverse mode (jax.grad, jax.vjp, jax.jacrev), or"
  ' implementation="reference" (of layers: trace them under'
  ' memcomp_kernels.default_implementation("reference"))'
)
SECOND = (
  "memcomp_kernels: a gradient of a gradient is not supported through packed"
  " rows, kernels and solvers per token; use one segment per row, or"
  ' implementation="reference" (of layers: trace them under'
  ' memcomp_kernels.default_implementation("reference"))'
)


SAVED = "memories"
"""Name, for `jax.checkpoint` policies, of a memory's saved values.

These are its outputs, and what its gradient needs besides inputs. If a policy
keeps them when it recomputes a layer, no tile is run forward again.
"""


def saved(tree: Any) -> Any:
  """Gives arrays the name `SAVED`."""
  return jax.tree.map(lambda x: checkpoint_name(x, SAVED), tree)


def custom_vjp(
  function: Callable[..., Any],
  forward: Callable[..., Any],
  backward: Callable[..., Any],
  nondiff_argnums: tuple[int, ...] = (),
) -> Callable[..., Any]:
  """Returns `function` with a custom gradient.

  Args:
    function: as for `jax.custom_vjp`.
    forward: the forward rule, as for its `defvjp`.
    backward: the backward rule, as for its `defvjp`.
    nondiff_argnums: as for `jax.custom_vjp`.
  """
  promoted = contract.default_promotion
  own = jax.custom_vjp(promoted()(function), nondiff_argnums=nondiff_argnums)
  own.defvjp(promoted()(forward), promoted()(backward))

  @functools.wraps(function)
  def call(*arguments):
    guarded = (
      x if i in nondiff_argnums else jax.tree.map(_guarded, x)
      for i, x in enumerate(arguments)
    )
    try:
      return own(*guarded)
    except TypeError as error:
      # Under `jax.vmap`, as in `jax.jacfwd`, JAX itself raises first.
      if "forward-mode" in str(error):
        raise TypeError(REFUSAL) from None
      raise

  return call


def only_first(tree: Any) -> Any:
  """Returns `tree`; differentiating the result raises an error.

  Rules of `custom_vjp` apply this to their operands where kernels or loops of
  run-time length have no derivative. JAX would raise only later, and its error
  would not say what to do.
  """
  return jax.tree.map(
    lambda x: _only_first(x) if jnp.issubdtype(x.dtype, jnp.floating) else x,
    tree,
  )


@jax.custom_jvp
def _only_first(x: jax.Array) -> jax.Array:
  return x


@_only_first.defjvp
def _only_first_jvp(primals, tangents):
  del primals, tangents
  raise TypeError(SECOND)


def _guarded(x: jax.Array) -> jax.Array:
  return _guard(x) if jnp.issubdtype(x.dtype, jnp.floating) else x


@jax.custom_jvp
def _guard(x: jax.Array) -> jax.Array:
  """The identity, whose derivative exists in reverse mode only."""
  return x


@_guard.defjvp
def _guard_jvp(primals, tangents):
  (x,), (tangent,) = primals, tangents
  return x, _reverse_only.bind(tangent)


def _refuse(*_, **__):
  raise TypeError(REFUSAL)


# This primitive is linear and has only a transpose. Reverse mode transposes it
# and never runs it. Forward mode would run it, which raises.
_reverse_only = core.Primitive("reverse_mode_only")
_reverse_only.def_impl(_refuse)
_reverse_only.def_abstract_eval(lambda x: x)
ad.deflinear2(_reverse_only, lambda cotangent, _: [cotangent])
batching.defvectorized(_reverse_only)
mlir.register_lowering(_reverse_only, _refuse)
