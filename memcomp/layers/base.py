"""The base of all sequence mixers: calls, state, packing and sharding.

A subclass supplies its parameters (`build`), its initial state (`fresh_state`),
the memory's inputs (`inputs`) and the layer's output (`outputs`):

  layer = Trellis(512, heads=8, rngs=nnx.Rngs(0))
  y = layer(x)                                # [batch, time, d_model]
  y, state = layer(x, state=layer.init_state(batch))
  y_t, state = layer.step(x_t, state)         # [batch, d_model]
"""

import contextlib
import operator
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from memcomp import sharding
from memcomp.layers import call_checks, linear, options, parameters
from memcomp.sharding import explicit
from memcomp_kernels import Op, checks, contract, dispatch
from memcomp_kernels.math import solver


class Call(NamedTuple):
  """The optional arguments of one call; see `Mixer.__call__`."""

  segment_ids: jax.Array | None = None
  first_value: jax.Array | None = None
  noise: jax.Array | None = None
  max_position: int | None = None


class Mixer(nnx.Module):
  """A sequence mixer from `[batch, time, d_model]` to the same shape.

  Args:
    d_model: number of input and output features.
    rngs: random streams for the initial parameters.
    std: initial standard deviation of the weights.
    out_std: initial standard deviation of the output projection; None uses
      `std`.
    rules: map logical axes to mesh axes (`memcomp.sharding.rules`). Without
      rules the layer shards nothing itself.
    given: the options of `Config` by keyword.

  Raises:
    TypeError: the mixer has no such option.
    ValueError: an option is out of range, or the heads do not divide the width.
  """

  Config: ClassVar[type[options.MixerConfig]] = options.MixerConfig
  op: ClassVar[Op]
  """The op of `Config`."""
  memory_fields: ClassVar[tuple[str, ...]] = ("memory",)
  """Fields of the memory state that the metric `memory_norms` measures."""

  heads: int
  key_dim: int
  value_dim: int
  spec: Any

  def __init_subclass__(cls, **keywords: Any):
    super().__init_subclass__(**keywords)
    cls.op = cls.Config.op
    cls.__signature__ = options.signature(Mixer.__init__, cls.Config)
    about = cls.__dict__.get("__doc__") or cls.__name__
    cls.__doc__ = options.documentation(about, cls.Config)

  def __init__(
    self,
    d_model: int,
    *,
    rngs: nnx.Rngs,
    std: float = 0.02,
    out_std: float | None = None,
    rules: sharding.Rules = sharding.NONE,
    **given: Any,
  ):
    if not isinstance(rngs, nnx.Rngs):
      raise TypeError(
        f"{type(self).__name__}: rngs is of type {type(rngs).__name__},"
        " expected flax.nnx.Rngs, such as nnx.Rngs(0)"
      )
    config = options.configure(type(self).__name__, self.Config, d_model, given)
    self.d_model, self.rules = d_model, rules
    self.heads = config.heads
    self.key_dim, self.value_dim = config.key_dim, config.value_dim
    self.spec = config.spec()
    self.has_stats = False
    out_std = std if out_std is None else out_std
    self.build(config, parameters.Make(rngs, d_model, std, out_std))

  @classmethod
  def from_config(
    cls, config: options.MixerConfig, d_model: int, **keywords: Any
  ) -> Self:
    """Makes the mixer that a config describes.

    Args:
      config: an instance of the class `Config`.
      d_model: number of input and output features.
      keywords: `rngs`, and optionally `std`, `out_std` and `rules`.
    """
    if not isinstance(config, cls.Config):
      raise TypeError(
        f"{cls.__name__}.from_config: config is of type"
        f" {type(config).__name__}, expected {cls.Config.__name__}"
      )
    return cls(d_model, **keywords, **options.values(config))

  # Subclasses must define these methods.

  def build(self, config: Any, make: parameters.Make) -> None:
    """Makes the parameters; all sizes in `config` are filled in."""
    raise NotImplementedError

  def fresh_state(self, batch: int, length: int | None = None) -> Any:
    """The initial state: a NamedTuple with a field `memory`."""
    raise NotImplementedError

  def inputs(self, x: jax.Array, state: Any, call: Call) -> tuple[Any, Any]:
    """Maps `[batch, time, d_model]` to the memory's inputs, and the new state.

    The new state still contains the old memory.
    """
    raise NotImplementedError

  def outputs(self, x: jax.Array, y: jax.Array) -> jax.Array:
    """Maps the memory's `[batch, time, heads, dim]` to d_model features."""
    raise NotImplementedError

  # Subclasses may override these methods.

  def fresh_memory(self, batch: int, memory: Any, call: Call) -> Any:
    """The memory at the start of a new segment; `memory` is the current one.

    None means `memory` itself, if the caller knows that it is fresh.
    """
    del memory, call
    return self.fresh_state(batch).memory

  def load(self, memory: Any) -> Any:
    """Copies learned parameters into a memory state that contains them."""
    return memory

  def value_of(self, x: jax.Array) -> jax.Array:
    """The values of `x` for the value residuals of later layers."""
    del x
    raise NotImplementedError(f"{type(self).__name__} has no value residual")

  def options_of_chunk(self, inputs: Any) -> tuple[Any, Any, dict[str, Any]]:
    """The inputs, spec and extra keywords for a call of `op.chunk`."""
    return inputs, self.spec, {}

  def mix(
    self, x: jax.Array, state: Any, call: Call, run: Callable[..., Any]
  ) -> tuple[jax.Array, Any]:
    """Runs one call; `run(memory, inputs)` gives (memory, y)."""
    inputs, new_state = self.inputs(x, state, call)
    memory, y = run(state.memory, inputs)
    return self.outputs(x, y), new_state._replace(memory=memory)

  # All mixers share these methods.

  def init_state(self, batch: int, length: int | None = None) -> Any:
    """The state before the first token.

    Args:
      batch: number of rows.
      length: number of tokens that a growing memory must hold; None is the
        maximum of the options. A memory of constant size ignores it.

    Raises:
      ValueError: `batch` or `length` is not an integer, 0 or more.
    """
    for name, x in (("batch", batch), ("length", length or 0)):
      checks.count(type(self).__name__, name, x)
    if length is not None:
      length = max(length, 1)  # room for no token has no shape
    state = self.fresh_state(batch, length)
    return contract.own_buffers(state, nnx.state(self))

  def memories(self, state: Any) -> tuple[jax.Array, ...]:
    """The arrays whose root mean square is the metric `memory_norms`."""
    memory = state.memory
    return tuple(operator.attrgetter(f)(memory) for f in self.memory_fields)

  @overload
  def __call__(
    self,
    x: Float[Array, "batch time d_model"],
    *,
    segment_ids: Int[Array, "batch time"] | None = None,
  ) -> Float[Array, "batch time d_model"]: ...

  @overload
  def __call__(
    self,
    x: Float[Array, "batch time d_model"],
    state: Any,
    *,
    segment_ids: Int[Array, "batch time"] | None = None,
    first_value: Float[Array, "batch time width"] | None = None,
    noise: jax.Array | None = None,
    max_position: int | None = None,
  ) -> tuple[Float[Array, "batch time d_model"], Any]: ...

  def __call__(
    self,
    x: Float[Array, "batch time d_model"],
    state: Any = None,
    *,
    segment_ids: Int[Array, "batch time"] | None = None,
    first_value: Float[Array, "batch time width"] | None = None,
    noise: jax.Array | None = None,
    max_position: int | None = None,
  ) -> Any:
    """Mixes a sequence.

    A new segment always starts from the layer's initial state.

    Args:
      x: `[batch, time, d_model]` of any float dtype; the layer computes in it.
      state: state before the first token; None is a fresh one.
      segment_ids: int32 `[batch, time]`, 0 is padding; None for one segment.
      first_value: `[batch, time, width]`, for value residuals: the values of
        the first layer of this kind (`value_of`). None if this is that layer.
      noise: PRNG key for random operations in training; None disables them.
      max_position: static upper bound of the tokens that any row has seen
        before this call; None if unknown. It never changes results, but a
        growing memory then computes with fewer rows.

    Returns:
      y with the shape of x; with `state`, also the state after the last token.

    Raises:
      ValueError: x has the wrong shape.
    """
    call_checks.check(self, x, "batch, time", state, segment_ids, first_value)
    fresh = state is None
    if not x.shape[1]:  # without tokens the state stays unchanged
      return x if fresh else (x, state)

    def whole(self, x, state, segment_ids, first_value, noise):
      position = 0 if fresh else max_position
      call = Call(segment_ids, first_value, noise, position)
      if fresh:
        state = self.init_state(*x.shape[:2])
        return self._sequence(x, state, call)[0]
      return self._sequence(x, state, call)[:2]

    return explicit.call(
      self,
      whole,
      x,
      state,
      segment_ids,
      first_value,
      noise,
      names=("batch", "time"),
      like=lambda: x if fresh else (x, state),
      heads=self._fewest_heads,
    )

  @contract.default_promotion()
  def with_stats(
    self, x: jax.Array, state: Any, **options: Any
  ) -> tuple[jax.Array, Any, solver.Stats | None]:
    """Mixes a sequence, and also returns how its systems were solved.

    Args:
      x: `[batch, time, d_model]`; a mesh in use must have Auto axes.
      state: state before the first token.
      **options: optional arguments of `__call__`.

    Returns:
      y, the new state, and statistics `[batch, heads]`, or None if the layer
      does not use sweeps.
    """
    ids, first = options.get("segment_ids"), options.get("first_value")
    call_checks.check(self, x, "batch, time", state, ids, first)
    call_checks.check_state(self, x.shape[0], state)
    x, state, options = explicit.as_jax((x, state, options))
    if not x.shape[1]:
      return x, state, None
    return self._sequence(x, state, Call(**options))

  def step(
    self,
    x: Float[Array, "batch d_model"],
    state: Any,
    *,
    first_value: Float[Array, "batch width"] | None = None,
  ) -> tuple[Float[Array, "batch d_model"], Any]:
    """Mixes one token; the cost does not grow with earlier tokens.

    Args:
      x: `[batch, d_model]`.
      state: state before the token.
      first_value: `[batch, width]`; see `__call__`.

    Returns:
      y with the shape of x, and the new state.
    """
    call_checks.check(self, x, "batch", state, first_value=first_value)
    call_checks.check_state(self, x.shape[0], state)

    def token(self, x, state, first_value):
      x = x[:, None]
      if first_value is not None:
        first_value = first_value[:, None]
      y, state = self.mix(x, state, Call(first_value=first_value), self._step)
      return y[:, 0], state

    return explicit.call(
      self,
      token,
      x,
      state,
      first_value,
      names=("batch",),
      like=lambda: (x, state),
      heads=self._fewest_heads,
    )

  def _sequence(self, x, state, call):
    """Returns y, the new state and statistics, under Auto mesh axes."""
    stats = None

    def run(memory, inputs):
      nonlocal stats
      memory = self.load(memory)
      inputs, spec, keywords = self.options_of_chunk(inputs)
      keywords["max_position"] = call.max_position
      reset = None
      if call.segment_ids is not None:
        reset = self.fresh_memory(x.shape[0], memory, call)
      chunk = self.rules.shard_chunk(self.op, self.op.pass_state(spec))
      with self._without_kernels_if_partitioned():
        memory, y, stats = chunk(
          memory,
          inputs,
          spec=spec,
          segment_ids=call.segment_ids,
          reset_state=reset,
          **keywords,
        )
      return memory, y

    y, state = self.mix(x, state, call, run)
    return y, state, stats if self.has_stats else None

  def _step(self, memory, inputs):
    inputs = jax.tree.map(lambda a: a[:, 0], inputs)
    memory, y = self.op.step(self.load(memory), inputs, spec=self.spec)
    return memory, y[:, None]

  def _without_kernels_if_partitioned(self):
    if self.rules.needs_xla_form():
      return dispatch.default_implementation("xla_chunked")
    return contextlib.nullcontext()

  @property
  def _fewest_heads(self) -> int:
    """Heads of queries or, if they share keys and values, of those."""
    return getattr(self, "kv_heads", self.heads)

  # Subclasses use these helpers.

  def init_memory(self, batch: int, **keywords: Any) -> Any:
    """The memory before the first token, in this layer's sizes and dtype."""
    leaves = jax.tree.leaves(nnx.state(self, nnx.Param))
    wide = any(leaf.dtype == jnp.float64 for leaf in leaves)
    dtype = jnp.float64 if wide else jnp.float32
    sizes = {n: getattr(self, n) for n in ("heads", "key_dim", "value_dim")}
    return self.op.init_state(
      self.spec, batch=batch, dtype=dtype, **(sizes | keywords)
    )

  def split(self, x: jax.Array) -> jax.Array:
    """Reshapes `[batch, time, heads * dim]` to `[batch, time, heads, dim]`."""
    return linear.split_heads(x, self.heads, self.rules)


def copied(parameter: nnx.Variable, field: jax.Array) -> jax.Array:
  """Returns a parameter as a state's field, in the wider dtype of the two."""
  with contract.default_promotion():
    dtype = jnp.promote_types(parameter.dtype, field.dtype)
  return jnp.broadcast_to(parameter[...].astype(dtype), field.shape)


def wide(x: jax.Array) -> jax.Array:
  """Casts x to float32 unless it is wider; gates are computed in this dtype."""
  return x.astype(linear.wide_dtype(x))
