"""The language model: embedding, scan over blocks, norm, head."""

from typing import Any, overload

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp import sharding
from memcomp.layers import base, call_checks
from memcomp.models import (
  block,
  decoder_config,
  decoder_state,
  unstacked,
  vocabulary,
)
from memcomp.models import stacks as stacks_lib
from memcomp.sharding import explicit
from memcomp_kernels import contract
from memcomp_kernels.math import solver
from memcomp_kernels.options import kind

DecoderConfig = decoder_config.DecoderConfig
DecoderState = decoder_state.DecoderState
Call = base.Call


class Decoder(vocabulary.Vocabulary):
  """A decoder-only language model.

  Args:
    config: the model's config.
    rngs: random streams.
    rules: map logical axes to mesh axes; see `memcomp.sharding.rules`.

  Raises:
    ValueError: a field of `config` is out of range.
  """

  def __init__(
    self,
    config: DecoderConfig,
    *,
    rngs: nnx.Rngs,
    rules: sharding.Rules = sharding.NONE,
  ):
    config.validate()
    super().__init__(config, rngs=rngs, rules=rules)
    stacks = stacks_lib.stacks_of(config)

    def build(stack):
      @nnx.vmap(in_axes=(0, 0))
      def blocks(rngs, depth):
        mixer = config.mixers[stack.name]
        return block.Block(config, mixer, depth, rngs=rngs, rules=rules)

      layer = jnp.array(stack.depths)
      return blocks(rngs.split(stack.repeats), layer / config.num_layers)

    self.layers = nnx.Dict(
      {str(i): build(stack) for i, stack in enumerate(stacks)}
    )
    self.stacks = stacks
    # Per stack: the index of the stack whose first layer provides its first
    # value.
    kinds = [stack.name for stack in stacks]
    self.value_sources = tuple(
      kinds.index(stack.name)
      if config.mixers[stack.name].uses_first_value
      else None
      for stack in stacks
    )
    self.num_layers = config.num_layers
    self.remat = config.remat

  def _split(self):
    """Returns graph definition and parameters of every stack."""
    return [nnx.split(self.layers[str(i)]) for i in range(len(self.stacks))]

  def layer(
    self, depth: int, state: DecoderState
  ) -> tuple[block.Block, block.BlockState]:
    """Returns one block and its state, to inspect a model.

    Args:
      depth: depth of the block, in [0, num_layers).
      state: state of the model.

    Raises:
      IndexError: there is no such layer.
    """
    for index, stack in enumerate(self.stacks):
      row, offset = divmod(depth - stack.first, stack.period)
      if not offset and 0 <= row < stack.repeats:
        graphdef, params = nnx.split(self.layers[str(index)])
        params = jax.tree.map(lambda x, row=row: x[row], params)
        of_layer = unstacked.of_layer(state.layers[index], row)
        return nnx.merge(graphdef, params), of_layer
    raise IndexError(f"there is no layer {depth} of {self.num_layers}")

  @contract.default_promotion()
  def init_state(self, batch: int, length: int | None = None) -> DecoderState:
    """The state before the first token, including learned memories.

    Args:
      batch: number of rows.
      length: number of tokens that growing memories must hold; None is the
        maximum of their configs.
    """
    taps = None
    if self.convolution is not None:
      taps = self.convolution.init_state(batch)

    def stack(graphdef, params):
      def one(params):
        return nnx.merge(graphdef, params).init_state(batch, length)

      return jax.vmap(one)(params)

    layers = tuple(stack(*split) for split in self._split())
    return DecoderState(taps, jnp.zeros(batch, jnp.int32), layers)

  @overload
  def __call__(
    self,
    tokens: jax.Array,
    *,
    state: None = None,
    segment_ids: jax.Array | None = None,
  ) -> jax.Array: ...

  @overload
  def __call__(
    self,
    tokens: jax.Array,
    *,
    state: DecoderState,
    segment_ids: jax.Array | None = None,
  ) -> tuple[jax.Array, DecoderState]: ...

  def __call__(
    self,
    tokens: jax.Array,
    *,
    state: DecoderState | None = None,
    segment_ids: jax.Array | None = None,
  ) -> jax.Array | tuple[jax.Array, DecoderState]:
    """Predicts the token after each token.

    Args:
      tokens: int `[batch, time]`, in [0, vocab_size). That is not checked: the
        logits of a row with a higher id are nan.
      state: state from `init_state` or a call; by default a fresh one.
      segment_ids: `[batch, time]`, 0 is padding; None for one segment.

    Returns:
      Float32 logits `[batch, time, vocab]`; with `state`, a tuple of the logits
      and the new state.
    """
    self._check(tokens, 2, "batch, time", state, segment_ids)
    if segment_ids is not None and segment_ids.shape != tokens.shape:
      raise ValueError(
        f"Decoder: segment_ids has shape {segment_ids.shape}, expected"
        f" {tokens.shape}, as tokens"
      )
    fresh = state is None

    def predict(self, tokens, state, segment_ids):
      hidden, new_state = self.hidden(
        tokens, state=state, segment_ids=segment_ids
      )
      logits = self.logits(hidden)
      return logits if fresh else (logits, new_state)

    return explicit.call(
      self,
      predict,
      tokens,
      state,
      segment_ids,
      names=("batch", "time"),
      like=lambda: tokens if fresh else (tokens, state),
    )

  def hidden(
    self, tokens: jax.Array, **options: Any
  ) -> tuple[jax.Array, DecoderState]:
    """Runs many tokens through everything except the head.

    Takes the arguments of `with_stats`, and returns its first two results.
    """
    return self.with_stats(tokens, **options)[:2]

  @contract.default_promotion()
  def with_stats(
    self,
    tokens: jax.Array,
    *,
    state: DecoderState | None = None,
    segment_ids: jax.Array | None = None,
    noise: jax.Array | None = None,
    max_position: int | None = None,
    table: jax.Array | None = None,
  ) -> tuple[jax.Array, DecoderState, solver.Stats | None]:
    """Runs everything except the head; also returns solver statistics.

    Args:
      tokens: int `[batch, time]`.
      state: state before the first token; by default a fresh one.
      segment_ids: `[batch, time]`, 0 is padding; None for one segment.
      noise: PRNG key for random operations in training; None disables them.
      max_position: upper bound of the tokens that any row has seen before; 0
        without a state. If given, growing memories compute with fewer rows.
      table: embedding table from `tables`; by default the parameter itself.

    Returns:
      hidden `[batch, time, d_model]` for `logits`, the new state, and
      statistics `[layers]`: zeros for layers that solve nothing, None if no
      layer does.
    """
    if state is None:
      state, max_position = self.init_state(*tokens.shape), 0
    x, taps = self.embed(tokens, state, segment_ids, table)
    call = Call(segment_ids=segment_ids, max_position=max_position)

    def run(blocks, x, state, call):
      x, state, parts = blocks.with_parts(x, state, call, before)
      return x, (state, parts.stats)

    before = state.segment_id
    x, results = self._run(run, x, state.layers, call, noise, self.remat)
    layers = tuple(unstacked.field(r, 0) for r in results)
    stats = [unstacked.field(r, 1) for r in results]
    if segment_ids is None:
      last = contract.next_segment_id(state.segment_id)
    else:
      _, last = contract.segment_starts(segment_ids, state.segment_id)
      last = last.astype(state.segment_id.dtype)
    return self.norm(x), DecoderState(taps, last, layers), self._stats(stats)

  @contract.default_promotion()
  def mixer_io(
    self, tokens: jax.Array, segment_ids: jax.Array | None = None
  ) -> tuple[jax.Array, jax.Array]:
    """Inputs and outputs of all mixers, `[layers, batch, time, d_model]` each.

    Args:
      tokens: int `[batch, time]`.
      segment_ids: `[batch, time]`, 0 is padding; None for one segment.
    """
    state = self.init_state(*tokens.shape)
    x, _ = self.embed(tokens, state, segment_ids)
    before = state.segment_id

    def run(blocks, x, state, call):
      x, _, parts = blocks.with_parts(x, state, call, before)
      return x, (parts.given, parts.mixed)

    call = Call(segment_ids=segment_ids, max_position=0)
    _, io = self._run(run, x, state.layers, call, None, "none")
    given, mixed = zip(*io, strict=True)
    return self._by_layer(given), self._by_layer(mixed)

  def step(
    self, tokens: jax.Array, state: DecoderState
  ) -> tuple[jax.Array, DecoderState]:
    """Runs one token per row, `[batch]`; returns logits `[batch, vocab]`.

    The new state is stacked or unstacked like the given one.
    """
    self._check(tokens, 1, "batch", state)
    call_checks.check_state(self, len(tokens), state)
    return explicit.call(
      self,
      Decoder._step,
      tokens,
      state,
      names=("batch",),
      like=lambda: (tokens, state),
    )

  def _check(self, tokens, axes, names, state, segment_ids=None):
    call_checks.check_arrays(
      self, "tokens", tokens=tokens, segment_ids=segment_ids
    )
    if tokens.ndim != axes or not jnp.issubdtype(tokens.dtype, jnp.integer):
      raise ValueError(
        f"Decoder: tokens is {tokens.dtype} of shape {tokens.shape}, expected"
        f" integers [{names}]"
      )
    if not isinstance(state, DecoderState | None):
      raise TypeError(
        f"Decoder: state is of type {kind(state)}; make it by"
        f" init_state({len(tokens)})"
      )

  def _step(self, tokens, state):
    x, taps = self.embed(tokens[:, None], state)

    def run(blocks, x, state, call):
      return blocks.step(x, state, call, before)

    before = state.segment_id
    x, layers = self._run(run, x[:, 0], state.layers, Call(), None, "none")
    state = DecoderState(
      taps, contract.next_segment_id(state.segment_id), layers
    )
    return self.logits(self.norm(x)), state

  def _run(self, run, x, states, call, noise, remat):
    """Runs all blocks; `run(block, x, state, call)` runs one."""
    splits = self._split()
    first_values = [
      None if source is None else self._first_value(splits[source], x)
      for source in self.value_sources
    ]
    new_states = list(states)
    for part in range(self.stacks[-1].part + 1):
      indices = [i for i, s in enumerate(self.stacks) if s.part == part]

      def body(x, layer, indices=indices):
        step, params, states = layer
        new = []
        for i, params_, state in zip(indices, params, states, strict=True):
          layer_call = call._replace(first_value=first_values[i])
          if noise is not None:
            depth = self.stacks[i].first + step * self.stacks[i].period
            layer_call = layer_call._replace(
              noise=jax.random.fold_in(noise, depth)
            )
          blocks = nnx.merge(splits[i][0], params_)
          x, state = run(blocks, x, state, layer_call)
          new.append(state)
        return x, tuple(new)

      if remat != "none":
        body = jax.checkpoint(
          body, prevent_cse=False, policy=decoder_config.REMAT[remat]
        )
      params = tuple(splits[i][1] for i in indices)
      part_states = tuple(states[i] for i in indices)
      x, new = unstacked.scan(body, x, params, part_states)
      for i, state in zip(indices, new, strict=True):
        new_states[i] = state
    return x, tuple(new_states)

  def _first_value(self, split, x):
    graphdef, params = split
    first = jax.tree.map(lambda p: p[0], params)
    return nnx.merge(graphdef, first).first_value(x)

  @contract.default_promotion()
  def memory_norms(self, state: DecoderState) -> jax.Array:
    """Root mean square of each layer's memories, float32 `[layers]`."""
    norms = []
    for (graphdef, params), states in zip(
      self._split(), state.layers, strict=True
    ):

      def one(params, state, graphdef=graphdef):
        arrays = nnx.merge(graphdef, params).mixer.memories(state.mixer)
        squares = sum(jnp.sum(jnp.square(a)) for a in arrays)
        # A float, because the caches of a large batch exceed int32 counts.
        size = float(max(sum(a.size for a in arrays), 1))
        return jnp.sqrt(squares / size)

      norms.append(jax.vmap(one)(params, unstacked.stack(states)))
    return self._by_layer(norms)

  def _stats(self, found: list[Any]) -> solver.Stats | None:
    """Statistics by layer from those of stacks, `[repeats, batch, heads]`."""
    if not jax.tree.leaves(found):
      return None
    stacks = []
    for stack, stats in zip(self.stacks, found, strict=True):
      stats = unstacked.stack(stats)
      if stats is None:
        stats = solver.no_stats((stack.repeats, 1, 1))
      # Total over rows and heads.
      rows = jax.tree.map(lambda x: x.reshape(len(x), -1).T, stats)
      stacks.append(solver.total(rows))
    return jax.tree.map(lambda *x: self._by_layer(x), *stacks)

  def _by_layer(self, by_stack) -> jax.Array:
    """Reorders `[repeats, ...]` of every stack to `[layers, ...]` by depth."""
    order = [depth for stack in self.stacks for depth in stack.depths]
    by_layer = sorted(range(len(order)), key=order.__getitem__)
    return jnp.concatenate(by_stack)[jnp.array(by_layer)]
