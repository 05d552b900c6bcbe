"""`Op`: a memory's definition, and the functions that are derived from it.

  from memcomp_kernels import gated_delta_rule

  y, state = gated_delta_rule(q, k, v, g=log_decay, beta=beta)

A memory defines its `Spec` (its static options), its `Inputs` (the arrays per
token) and its `State` (what it keeps between calls). It also defines one step
as its paper writes it, and its implementations. The annotations of `Inputs` and
`State` state their shapes in words (see `shapes`).
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from memcomp_kernels import arguments, checks, contract, dispatch, shapes
from memcomp_kernels.facts import Facts
from memcomp_kernels.parallel import state_passing, wavefront

Implementation = str | Sequence[str] | None

_KINDS = "Spec", "Inputs", "State"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Op:
  """A memory. A direct call, `op(q, k, v)`, runs it over a sequence.

  Attributes:
    name: public name.
    about: what the memory computes, in Markdown. Its first line is a sentence.
    Spec: frozen dataclass of the options that define the computation.
    Inputs: NamedTuple of annotated arrays.
    State: NamedTuple of annotated arrays, with `segment_id`.
    token_step: (state, inputs without time, *, spec) -> (state, y).
    forms: all implementations but the step under `lax.scan`, by name:
      `dispatch.Call` -> (state, y) or (state, y, statistics or None), or a
      `dispatch.Kernel`.
    tiled: names of the forms that read a `tiling`, where there is a `Tiling`.
    order: names of the arrays that a direct call also takes by position.
    names: maps a field of `Inputs` to its name in a direct call, in addition to
      `arguments.NAMES`.
    make_state: (spec, `shapes.StateSizes`, *, options) -> State, as
      `init_state`. None means a state of zeros.
    fresh: (spec, state) -> the state before the first token, which `FRESH`
      stands for. None means `init_state` at the sizes of the state.
    constants: fields of `State` that no token changes. `FRESH` keeps them.
    room: maps an option of `init_state` to the axis whose size a direct call
      gives it.
    chunks: whether `position` of `State` counts from the start of a chunk.
    check: (spec, sizes, state or None), raises ValueError for conditions that
      the annotated shapes cannot express.
    fixed: fields of `Spec` that the op's name determines in a direct call.
    facts: spec -> what the memory computes and costs.
    Tiling: type of the performance options, if there are any.
    pass_state: spec -> how shards along time pass the state on.
    output: axes of the outputs y.
  """

  name: str
  about: str
  Spec: Any
  Inputs: Any
  State: Any
  token_step: Callable[..., tuple[Any, jax.Array]]
  facts: Callable[[Any], Facts]
  forms: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
  tiled: tuple[str, ...] = ("xla_chunked",)
  order: tuple[str, ...] = ("q", "k", "v")
  names: Mapping[str, str] = dataclasses.field(default_factory=dict)
  make_state: Callable[..., Any] | None = None
  fresh: Callable[[Any, Any], Any] | None = None
  constants: tuple[str, ...] = ()
  room: Mapping[str, str] = dataclasses.field(default_factory=dict)
  chunks: bool = False
  check: Callable[[Any, shapes.Sizes, Any], None] | None = None
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  Tiling: Any = None
  pass_state: Callable[[Any], state_passing.Strategy] = lambda _: (
    wavefront.pass_state
  )
  output: str = "batch, time, heads, value_dim"

  def __post_init__(self):
    for name, value in {
      "__name__": self.name,
      "__signature__": arguments.signature(self),
      "__doc__": arguments.documentation(self),
    }.items():
      object.__setattr__(self, name, value)

  @classmethod
  def of(cls, definition: Any, **fields: Any) -> Self:
    """Makes an op of a module's `Spec`, `Inputs`, `State` and `step`."""
    kinds = {name: getattr(definition, name) for name in _KINDS}
    return cls(**kinds, token_step=definition.step, **fields)

  def __repr__(self) -> str:
    return f"<op {self.name}>"

  @functools.cached_property
  def implementations(self) -> dispatch.Implementations:
    """The forms, and the step under `lax.scan`: the reference."""
    reference = functools.partial(contract.scan, self.token_step)
    return dispatch.Implementations(
      self.name, self.tiled, reference=reference, **self.forms
    )

  @functools.cached_property
  def options(self) -> dict[str, inspect.Parameter]:
    """The arguments of `init_state` that not every op has."""
    if self.make_state is None:
      return {}
    parameters = inspect.signature(self.make_state).parameters
    return dict([*parameters.items()][2:])

  def init_state(
    self, spec: Any = None, *, dtype: Any = jnp.float32, **sizes: Any
  ) -> Any:
    """Returns the state before the first token.

    Args:
      spec: the memory's options. The default is `Spec()`.
      dtype: dtype of the memory, float32 or float64.
      **sizes: batch, heads, key_dim, value_dim, and the op's own options.

    Raises:
      ValueError: `dtype` is narrower than float32, or the sizes do not fit.
    """
    contract.check_state_dtype(dtype)
    spec = self.Spec(**self.fixed) if spec is None else spec
    checks.kinds(self, spec=spec)
    checks.sizes(self, sizes)
    with contract.default_promotion():
      if self.make_state is not None:
        common = {name: sizes.pop(name, None) for name in shapes.SIZES}
        made = shapes.StateSizes(**common, dtype=dtype)
        state = self.make_state(spec, made, **sizes)
        return contract.own_buffers(state, sizes)
      if self.check is not None:
        self.check(spec, sizes, None)
      return shapes.zeros(self.State, spec, sizes, dtype)

  def step(
    self, state: Any, inputs: Any, *, spec: Any
  ) -> tuple[Any, jax.Array]:
    """Runs one token. It is the body of a `lax.scan`.

    Args:
      state: the state before the token.
      inputs: `[batch, heads, ...]` arrays.
      spec: the memory's options.

    Returns:
      The state after the token, and y, with the axes of `output` but time.
    """
    checks.kinds(self, state=state, inputs=inputs, spec=spec)
    check = shapes.Check(self.name, spec)
    check.arrays(state, label="state.", floats=32)
    check.arrays(inputs, without=("time",))
    if self.check is not None:
      self.check(spec, check.sizes, state)
    checks.chunk_position(self, spec, state)
    state = jax.tree.map(jnp.asarray, state)  # such as one that was saved
    with contract.default_promotion():
      wide_state, wide_inputs = contract.one_width((state, inputs))
      wide_inputs = shapes.without_unused(wide_inputs, spec)
      new_state, y = self.token_step(wide_state, wide_inputs, spec=spec)
      return contract.like(new_state, state), y.astype(inputs.query.dtype)

  def reference(
    self, state: Any, inputs: Any, *, spec: Any, **options: Any
  ) -> tuple[Any, jax.Array]:
    """Scans `step` over time. This is the definition of the memory.

    Arguments and results are those of `chunk`, without `implementation`.
    """
    return self.chunk(
      state, inputs, spec=spec, **options, implementation="reference"
    )

  def chunk(
    self,
    state: Any,
    inputs: Any,
    *,
    spec: Any,
    segment_ids: jax.Array | None = None,
    reset_state: Any = None,
    implementation: Implementation = None,
    max_position: int | None = None,
    tiling: Any = None,
  ) -> tuple[Any, jax.Array]:
    """Runs the memory over many tokens, differentiable in state and inputs.

    Args:
      state: the state before the first token.
      inputs: `[batch, time, heads, ...]` arrays, see `Inputs`.
      spec: the memory's options.
      segment_ids: int32 `[batch, time]` for packed rows; 0 is padding.
      reset_state: the state that new segments start from: a state, or `FRESH`
        for what `init_state` gives. It is required with `segment_ids`, unless
        `max_position=0`, and not read without.
      implementation: a name, or several names in order of preference. The
        default is the fastest on the platform that supports the call.
      max_position: an upper bound of the number of tokens that the state has
        seen, and of those that `reset_state` has seen. 0 means that the state
        is fresh. Memories that grow save work with it, but they lose tokens if
        it is too low.
      tiling: performance options, where the memory has a `Tiling`. They never
        change results.

    Returns:
      The state after the last token, in the dtypes of the one before it, and y,
      with the axes of `output`, in the query's dtype.

    Raises:
      NotImplementedError: none of the named implementations supports the call.
      ValueError: shapes do not fit the state or each other, or `reset_state` is
        missing.
    """
    return self.with_stats(
      state,
      inputs,
      spec=spec,
      segment_ids=segment_ids,
      reset_state=reset_state,
      implementation=implementation,
      max_position=max_position,
      tiling=tiling,
    )[:2]

  def with_stats(
    self,
    state: Any,
    inputs: Any,
    *,
    spec: Any,
    implementation: Implementation = None,
    **options: Any,
  ) -> tuple[Any, jax.Array, Any]:
    """Runs `chunk`, whose arguments it takes, and also returns statistics.

    Returns:
      What `chunk` returns, and `solver.Stats` of `[batch, heads]`, or None
      where nothing was solved.
    """
    call = dispatch.Call(state, inputs, spec, **options)
    segment_ids, reset_state = call.segment_ids, call.reset_state
    max_position, tiling = call.max_position, call.tiling
    contract.check_reset(self.name, segment_ids, reset_state, max_position)
    checks.kinds(self, state=state, inputs=inputs, spec=spec)
    if reset_state is not None and reset_state is not contract.FRESH:
      checks.kinds(self, reset_state=reset_state)
    if tiling is not None:
      checks.kinds(self, tiling=tiling)
    check = shapes.Check(self.name, spec)
    check.arrays(state, label="state.", floats=32)
    check.arrays(inputs)
    if segment_ids is not None:
      segment_ids = checks.segment_ids(self, segment_ids)
      axes = "batch", "time"
      check.array("segment_ids", axes, segment_ids, dtype="int32")
    if self.check is not None:
      self.check(spec, check.sizes, state)
    checks.position(self, max_position, state)
    checks.chunk_position(self, spec, state)
    if segment_ids is not None and reset_state is None:
      checks.fresh(self, state)
    with contract.default_promotion():
      if segment_ids is None:
        reset_state = None
      elif reset_state is contract.FRESH:
        reset_state = self.fresh_state(state, spec)
      elif reset_state is not None:
        check.arrays(reset_state, label="reset_state.", floats=32)
        checks.position(self, max_position, reset_state, "reset_state")
        checks.chunk_position(self, spec, reset_state, "reset_state")
      if 0 in inputs.query.shape[:3]:
        y = self._nothing(state, inputs, spec)
        return jax.tree.map(jnp.asarray, state), y, None
      dtype, given = inputs.query.dtype, state
      arrays = contract.one_width((state, inputs, reset_state, segment_ids))
      state, inputs, reset_state, segment_ids = contract.vary_like(
        arrays, arrays
      )
      inputs = shapes.without_unused(inputs, spec)
      call = call._replace(
        state=state,
        inputs=inputs,
        segment_ids=segment_ids,
        reset_state=reset_state,
      )
      state, y, *stats = self.implementations.run(implementation, call)
      state = contract.like(state, given)
    return state, y.astype(dtype), stats[0] if stats else None

  def fresh_state(self, state: Any, spec: Any) -> Any:
    """Returns the state that `FRESH` stands for in a call with `state`.

    It is what `init_state` gives at the same sizes, except that it keeps those
    fields of `state` that no token changes.
    """
    if self.fresh is not None:
      found = self.fresh(spec, state)
    else:
      check = shapes.Check(self.name, spec)
      check.arrays(state, label="state.", floats=32)
      dtypes = [x.dtype for x in jax.tree.leaves(state)]
      dtype = next(x for x in dtypes if jnp.issubdtype(x, jnp.floating))
      found = self.init_state(spec, dtype=dtype, **self._given(check.sizes))
    return found._replace(**{k: getattr(state, k) for k in self.constants})

  def __call__(
    self,
    *arrays: jax.Array,
    state: Any = None,
    initial_state: Any = None,
    segment_ids: jax.Array | None = None,
    reset_state: Any = None,
    max_position: int | None = None,
    implementation: Implementation = None,
    output_final_state: bool = True,
    **keywords: Any,
  ) -> tuple[jax.Array, Any]:
    """Runs the memory over a sequence; `help` of an op lists its arguments.

    Raises:
      NotImplementedError: none of the named implementations supports the call.
      TypeError: an argument is unknown, missing or given twice.
      ValueError: shapes do not fit each other or the state, or `reset_state` is
        missing.
    """
    if state is not None and initial_state is not None:
      raise TypeError(
        f"{self.name}: state and initial_state are the same; give one"
      )
    checks.position(self, max_position, None)
    state = initial_state if state is None else state
    with contract.default_promotion():
      inputs, spec, options = arguments.bind(self, arrays, keywords)
      check = shapes.Check(self.name, spec)
      public = {field: name for name, field in arguments.names(self).items()}
      check.arrays(inputs, names=public)
      if segment_ids is not None:
        segment_ids = checks.segment_ids(self, segment_ids)
      if state is None:
        given = self._given(check.sizes)
        given |= checks.lengths(self, check.sizes, options)
        dtype = contract.accumulation_dtype(*jax.tree.leaves(inputs))
        state = self.init_state(spec, dtype=dtype, **given | options)
        if reset_state is contract.FRESH:
          reset_state = None  # `state` is fresh
        if reset_state is None or segment_ids is None:
          max_position = 0  # else it also bounds what `reset_state` has seen
      elif options:
        raise TypeError(
          f"{self.name}: {', '.join(options)}: for a fresh state alone, and a"
          " state is given"
        )
      checks.kinds(self, state=state)
      check.arrays(state, label="state.", floats=32)
      checks.room(self, state, spec, check, segment_ids, reset_state)
      state, y = self.chunk(
        state,
        inputs,
        spec=spec,
        segment_ids=segment_ids,
        reset_state=reset_state,
        implementation=implementation,
        max_position=max_position,
      )
    return y, state if output_final_state else None

  def _given(self, sizes: shapes.Sizes) -> dict[str, int]:
    """Returns the entries of `sizes` that `init_state` takes."""
    names = (*shapes.SIZES, *self.options)
    return {k: v for k, v in sizes.items() if k in names}

  def _nothing(self, state: Any, inputs: Any, spec: Any) -> jax.Array:
    """Returns the outputs of a call without rows, tokens or heads."""

    def one(x, time_axis):
      shape = [max(n, 1) for i, n in enumerate(x.shape) if i != time_axis]
      return jax.ShapeDtypeStruct(shape, x.dtype)

    _, y = jax.eval_shape(
      functools.partial(self.token_step, spec=spec),
      jax.tree.map(functools.partial(one, time_axis=None), state),
      jax.tree.map(functools.partial(one, time_axis=1), inputs),
    )
    batch, time, heads = inputs.query.shape[:3]
    heads = y.shape[1] if heads else 0
    return jnp.zeros((batch, time, heads, *y.shape[2:]), y.dtype)
