"""The decoder: steps, packing, hand-off, precision."""

import dataclasses

import decoder_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rotation
from flax import nnx
from jax.interpreters import partial_eval

from memcomp import sharding
from memcomp.layers import registry
from memcomp.models import overview
from memcomp_kernels.testing import errors


class Compiled:
  """A model whose calls are compiled.

  Nearly all of the time goes to compiling, so one program serves every call:
  rows are padded to `LONGEST` tokens and `ROWS` rows. That of the gradient
  takes three times as long to compile.
  """

  ROWS, LONGEST = 2, 33

  def __init__(self, config):
    model = cases.build(config)
    self.config = config
    self.model = model
    self.graph, params = nnx.split(model)
    # Changed ones are NumPy's, too, of the same dtypes: none is weak.
    self.params = jax.tree.map(np.asarray, params)
    self.run = jax.jit(self._run)
    self.run_gradient = jax.jit(jax.grad(self.loss))
    self.step = jax.jit(model.step)
    self.run_logits = jax.jit(self._logits)
    self.init_state = jax.jit(model.init_state, static_argnums=0)

  def __call__(self, ids, segment_ids=None, state=None, params=None):
    """Hidden values of `ids`, and the state after them in `ROWS` rows."""
    rows, time = ids.shape
    hidden, state = self.run(*self._padded(ids, segment_ids, state, params))
    return hidden[:rows, :time], state

  def logits(self, hidden, params=None):
    return self.run_logits(self.params if params is None else params, hidden)

  def gradient(self, params, ids, segment_ids=None):
    """Returns the gradient of `loss`, by parameter."""
    return self.run_gradient(*self._padded(ids, segment_ids, None, params))

  def steps(self, ids):
    """As `logits` of a call, by steps."""
    state, logits = self.init_state(ids.shape[0]), []
    for t in range(ids.shape[1]):
      y, state = self.step(ids[:, t], state)
      logits.append(y)
    return jnp.stack(logits, 1), state

  def loss(self, params, ids, segment_ids, state):
    """Hidden and logits of padding do not count."""
    hidden, _ = self._run(params, ids, segment_ids, state)
    logits = self._logits(params, hidden)
    read = jnp.sin(logits).mean(-1) + jnp.sin(hidden).sum(-1)
    return jnp.sum(jnp.where(segment_ids != 0, read, 0.0))

  def _run(self, params, ids, segment_ids, state):
    model = nnx.merge(self.graph, params)
    return model.hidden(ids, segment_ids=segment_ids, state=state)

  def _logits(self, params, hidden):
    return nnx.merge(self.graph, params).logits(hidden)

  def _padded(self, ids, segment_ids, state, params):
    rows, time = ids.shape
    if segment_ids is None:
      segment_ids = np.ones_like(ids)
    padding = ((0, self.ROWS - rows), (0, self.LONGEST - time))
    return (
      self.params if params is None else params,
      np.pad(ids, padding),
      np.pad(segment_ids, padding),
      self.init_state(self.ROWS) if state is None else state,
    )


def configured(name):
  return (
    cases.config(**cases.HYBRID) if name == "hybrid" else cases.config(name)
  )


@pytest.fixture(scope="module", params=[*registry.MIXERS, "hybrid"])
def model(request):
  return Compiled(configured(request.param))


def those_in(names):
  """Parametrizes `model`: mixers that are not in `names` are slow tests."""
  return pytest.mark.parametrize(
    "model", rotation.cases((*registry.MIXERS, "hybrid"), names), indirect=True
  )


@pytest.mark.parametrize("model", ["linear_attention"], indirect=True)
def test_a_call_gives_logits_and_given_a_state_the_new_one(model):
  call = jax.jit(model.model.__call__)
  documents, row, segments = packed_documents()
  hidden, state = model(documents)
  expected = model.logits(hidden)
  assert expected.shape == (2, 14, 50) and expected.dtype == jnp.float32
  packed = call(row, segment_ids=segments)
  errors.assert_close((packed[0, :14], packed[0, 17:31]), tuple(expected), 1e-5)
  found = call(documents, state=model.init_state(2))
  errors.assert_close(found, (expected, state), 1e-5)


def test_a_program_may_forbid_promotion():
  """Of dtypes and of ranks, of its own arrays."""
  model = cases.build(cases.config("gated_delta_net"))
  documents, row, segments = packed_documents()

  def whole(documents, row, segments):
    state = model.init_state(2)
    logits, state = model(documents, state=state)
    model.mixer_io(documents), model.memory_norms(state)
    step = model.step(documents[:, 0], state)
    return logits, step, model(row, segment_ids=segments)

  with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
    logits, *_ = jax.eval_shape(whole, documents, row, segments)
  assert logits.shape == (2, 14, 50)


# Every other layer's own tests say it of the layer.
@those_in(cases.OFTEN)
def test_steps_equal_the_sequence(model):
  ids = cases.tokens(2, cases.TIME)
  hidden, final = model(ids)
  errors.assert_close(model.steps(ids), (model.logits(hidden), final), 1e-5)


@those_in(cases.OFTEN)
def test_cut_anywhere(model):
  ids = cases.tokens(2, cases.TIME)
  hidden, final = model(ids)
  pieces, state = [], model.init_state(2)
  # Of a convolution's taps, and at every offset into a chunk of eight.
  for piece in np.split(ids, cases.TIME // 3, axis=1):
    piece, state = model(piece, state=state)
    pieces.append(piece)
  errors.assert_close(
    (jnp.concatenate(pieces, 1), state), (hidden, final), 1e-5
  )


def packed_documents():
  """Two documents, and a row of both with padding between: ids, segments."""
  documents = cases.tokens(2, 14)
  gap = np.zeros(3, np.int32)
  row = np.concatenate([documents[0], gap, documents[1], gap[:2]])
  segments = np.array([[4] * 14 + [0] * 3 + [2] * 14 + [0] * 2])
  return documents, row[None], segments


@those_in(cases.KINDS)
def test_packed_rows_equal_their_documents(model):
  documents, row, segments = packed_documents()
  packed, _ = model(row, segment_ids=segments)
  hidden, _ = model(documents)
  errors.assert_close((packed[0, :14], packed[0, 17:31]), tuple(hidden), 1e-5)


# A value that is right wherever it is taken has the right derivative; but for
# rules of our own, which the memories' own tests hold to it.
@those_in(())
def test_gradients_of_packed_rows(model):
  @jax.jit
  @jax.grad
  def gradient(params, ids, segment_ids):
    # The first segment goes on from this state, which learns from it, too.
    state = nnx.merge(model.graph, params).init_state(len(ids))
    return model.loss(params, ids, segment_ids, state)

  documents, row, segments = packed_documents()
  alone = np.repeat([[4], [2]], 14, axis=1)
  errors.assert_close(
    gradient(model.params, row, segments),
    gradient(model.params, documents, alone),
    1e-4,
  )


@those_in(cases.FOUR)  # Rows of every mixer are asked for text elsewhere.
def test_rows_padded_on_the_left_equal_rows_alone(model):
  short, long = cases.tokens(2, 9)[:1], cases.tokens(1, cases.TIME, seed=1)
  row = np.pad(short, ((0, 0), (cases.TIME - 9, 0)))
  ids = np.array([[0] * (cases.TIME - 9) + [1] * 9, [1] * cases.TIME], np.int32)
  both = np.concatenate([row, long])
  hidden, state = model(both, segment_ids=ids)
  logits = model.logits(hidden)
  alone, state_alone = model.steps(np.concatenate([short, short]))
  errors.assert_close(logits[0, cases.TIME - 9 :], alone[0], 1e-5)
  errors.assert_close(hidden[1], model(both)[0][1], 1e-5)
  following, _ = model.step(np.array([3, 3]), state)
  expected, _ = model.step(np.array([3, 3]), state_alone)
  errors.assert_close(following[0], expected[0], 1e-5)


@those_in(["trellis", "key_value_means", "tensor_cache"])
def test_a_state_made_for_the_length_is_as_good(model):
  ids = cases.tokens(2, cases.TIME)
  # Of fewer tokens, none seen: what comes later changes nothing.
  fresh, _ = jax.jit(model.model.hidden)(ids[:, :14])
  errors.assert_close(fresh, model(ids)[0][:, :14], 1e-5)


@those_in(cases.KINDS)
def test_padding_leaves_the_state_alone(model):
  _, state = model(cases.tokens(2, cases.TIME))
  nothing = np.zeros((2, cases.TIME), np.int32)
  _, after = model(
    cases.tokens(2, cases.TIME, seed=1), state=state, segment_ids=nothing
  )
  errors.assert_equal(after, state, "state after padding")


@those_in(cases.KINDS)
def test_causal(model):
  ids = cases.tokens(2, cases.TIME)
  changed = ids.copy()
  changed[:, 12] += 1
  before, after = model(ids)[0], model(changed)[0]
  np.testing.assert_array_equal(before[:, :12], after[:, :12])
  assert np.any(before[:, 12:] != after[:, 12:])


def parameters_by_name(params):
  leaves = jax.tree_util.tree_leaves_with_path(
    params, is_leaf=lambda x: isinstance(x, nnx.Variable)
  )
  return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


@pytest.mark.parametrize("name", [*registry.MIXERS, "hybrid"])
def test_every_parameter_is_read_and_named(name):
  """By what the traced program depends on; below, by what it computes."""
  config = configured(name)
  graph, params = nnx.split(nnx.eval_shape(lambda: cases.build(config)))
  leaves, tree = jax.tree.flatten(params)
  names = parameters_by_name(params)
  assert len(names) == len(leaves)
  for path, variable in names:
    assert "axes" in variable.get_metadata(), path
    sharding.RULES.spec(*sharding.axes_of(variable))
  _, row, segments = packed_documents()

  def logits(leaves):
    model = nnx.merge(graph, tree.unflatten(leaves))
    return model(row, segment_ids=segments)

  traced = jax.make_jaxpr(logits)(leaves).jaxpr
  _, read = partial_eval.dce_jaxpr(traced, [True])
  unread = [path for (path, _), x in zip(names, read, strict=True) if not x]
  assert not unread


def away_from_the_start(model):
  """Parameters, none of them zero; at the start some matrices are."""
  return jax.tree.map(lambda x: x + np.float32(0.01), model.params)


@those_in(cases.KINDS)
def test_every_parameter_is_used(model):
  """A change of any of them is seen, the initial memories included."""
  _, row, segments = packed_documents()  # which begin with the initial ones
  params = away_from_the_start(model)

  def logits(params):
    hidden, _ = model(row, segments, params=params)
    return model.logits(hidden, params)

  before = logits(params)
  leaves, tree = jax.tree.flatten(params)
  for i, (name, _) in enumerate(parameters_by_name(params)):
    changed = tree.unflatten([*leaves[:i], 1.5 * leaves[i], *leaves[i + 1 :]])
    assert np.any(before != logits(changed)), name


# Three times as long to compile. Layers differ in what goes into their memories,
# whose gradients the memories' tests compare with truth.
@those_in(("trellis",))
def test_every_parameter_is_trained(model):
  _, row, segments = packed_documents()
  gradient = model.gradient(away_from_the_start(model), row, segments)
  for name, variable in parameters_by_name(gradient):
    assert jnp.any(variable[...] != 0), name


# What each does in bfloat16 its own tests say; here, what differs in kind.
@those_in(())
def test_bfloat16_stays_near_float32_and_keeps_wide_states(model):
  ids = cases.tokens(2, cases.TIME)
  exact = model
  narrow = Compiled(dataclasses.replace(model.config, dtype="bfloat16"))
  hidden, state = jax.jit(narrow.model.hidden)(
    ids, state=narrow.model.init_state(2)
  )
  assert hidden.dtype == jnp.bfloat16
  assert narrow.logits(hidden).dtype == jnp.float32
  for leaf in jax.tree.leaves((state.layers, nnx.state(narrow.model))):
    assert leaf.dtype in (jnp.float32, jnp.int32)
  expected = exact.logits(exact(ids)[0])
  assert errors.relative_rms(narrow.logits(hidden), expected) < 0.05


def test_state_and_flops_by_hand():
  # 2 layers, 2 heads, 6 slots, 8 + 12 columns.
  assert overview.state_bytes(cases.config(), 99) == 2 * 2 * 6 * 20 * 4
  # Six m(k + v) products and, in chunks of 8, C (k + v + 2 m) twice.
  per_head = 6 * 6 * 20 + 2 * 8 * (8 + 12 + 2 * 6)
  assert overview.memory_flops_per_token(cases.config(), 99) == 2 * 2 * per_head


@those_in(cases.KINDS)
def test_memory_norms(model):
  _, state = model(cases.tokens(2, cases.TIME))
  norms = np.asarray(model.model.memory_norms(state))
  assert norms.shape == (model.config.num_layers,)
  # The middle layer, wherever the pattern puts it.
  stacks = model.model.stacks
  ((index, place),) = (
    (i, (1 - s.first) // s.period)
    for i, s in enumerate(stacks)
    if 1 in range(s.first, s.first + s.period * s.repeats, s.period)
  )
  blocks = model.model.layers[str(index)]
  of_layer = jax.tree.map(lambda x: x[place], state.layers[index].mixer)
  arrays = [np.asarray(a) for a in blocks.mixer.memories(of_layer)]
  squares = sum((a**2).sum() for a in arrays)
  count = sum(a.size for a in arrays)
  np.testing.assert_allclose(norms[1], (squares / count) ** 0.5, rtol=1e-6)


def test_a_state_by_layer_is_inspected_as_a_stacked_one():
  config = dataclasses.replace(cases.config("linear_attention"), num_layers=2)
  model = cases.build(config)
  # The rows of a batch are as many as the layers, and differ.
  state = model.init_state(2)
  state = jax.tree.map(
    lambda x: x + np.arange(x.size).reshape(x.shape).astype(x.dtype), state
  )
  by_layer = state.by_layer()
  jax.tree.map(
    np.testing.assert_array_equal,
    (model.memory_norms(by_layer), model.layer(1, by_layer)[1]),
    (model.memory_norms(state), model.layer(1, state)[1]),
  )


def test_memory_norms_of_more_entries_than_int32_counts():
  model = cases.build(cases.config("softmax_attention"))
  state = jax.eval_shape(lambda: model.init_state(2**20, 2**12))
  assert jax.eval_shape(model.memory_norms, state).dtype == jnp.float32
