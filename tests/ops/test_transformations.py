"""What JAX's transformations and checks make of every op; docs/use.md says it.

Float64 is what the contract suite runs in; forward mode and `jax.vmap` of calls
in one line are in `test_one_line_calls`.
"""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import op_cases
import pytest
import rotation
from jax import export
from jax.sharding import AxisType, PartitionSpec

from memcomp_kernels import FRESH, derivative, gated_delta_rule, lattice
from memcomp_kernels.math import solver
from memcomp_kernels.pallas_gpu import tile_kernel as gpu
from memcomp_kernels.pallas_tpu import launch as tpu
from memcomp_kernels.testing import errors, gradients, memories, tolerances

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "use.md"

TIME = 6
IDS = jnp.array([[1, 1, 2, 2, 0, 3], [1, 1, 1, 1, 1, 1]], jnp.int32)

SECOND_OF_PACKED = ("key_value_means", "softmax_attention", "tensor_cache")
"""Ops whose packed rows have a gradient of a gradient."""

# In every run; the others are slow tests.
OFTEN = ("gated_delta_rule",)
MESHES = ("trellis", "softmax_attention")
# Of two names for the same code one is enough.
ALL_BUT = ("delta_rule", "gated_slot_attention")

CASES = pytest.mark.parametrize(
  "name",
  rotation.cases([x for x in op_cases.CASES if x not in ALL_BUT], OFTEN),
)


@functools.cache
def under_way(name):
  """A state under way of the op called `name`, and inputs."""
  case = op_cases.CASES[name]
  inputs = jax.tree.map(lambda x: x[:, :TIME], case.inputs())
  before = jax.tree.map(lambda x: x[:, TIME : 2 * TIME], case.inputs())
  run = jax.jit(functools.partial(case.op.reference, spec=case.spec))
  return jax.device_get(run(case.fresh(), before))[0], inputs


def case_of(name):
  """The op's inputs, a state under way, and its call with both."""
  case = op_cases.CASES[name]
  state, inputs = under_way(name)

  def call(state, inputs, ids=None, **options):
    reset = None if ids is None else FRESH
    return case.op.chunk(
      state,
      inputs,
      spec=case.spec,
      segment_ids=ids,
      reset_state=reset,
      **options,
    )

  return call, state, inputs


def loss_of(call, state, inputs, ids=None, **options):
  """A function of values: of outputs and of the final state."""

  def loss(value):
    found = call(state, inputs._replace(value=value), ids, **options)
    floats = filter(gradients.is_float, jax.tree.leaves(found))
    return sum(jnp.sum(jnp.sin(x)) for x in floats)

  return loss


@CASES
def test_gradients_per_example(name):
  """Of each row by itself, as of all rows at once."""
  call, state, inputs = case_of(name)
  rows = jax.tree.map(lambda x: x[:, None], (state, inputs))

  def of_row(state, inputs):
    return jax.grad(loss_of(call, state, inputs))(inputs.value)

  found = jax.jit(jax.vmap(of_row))(*rows)[:, 0]
  expected = jax.jit(of_row)(state, inputs)
  errors.assert_close(found, expected, tolerances.GRADIENT["float32"], name)


@CASES
def test_donated_states(name):
  """States go on in their own memory; nobody is told that they cannot."""
  call, state, inputs = case_of(name)
  expected = jax.jit(call)(state, inputs)
  given = jax.tree.map(jnp.array, state)
  found = jax.jit(call, donate_argnums=0)(given, inputs)
  errors.assert_close(found, expected, tolerances.VALUE["float32"], name)
  floats = filter(gradients.is_float, jax.tree.leaves(given))
  assert any(x.is_deleted() for x in floats)


def traced_in_a_shard_map(
  memory, spec, ids, sizes=op_cases.SIZES, time=TIME, **options
):
  """Traces a gradient over two devices, from a state that does not vary."""

  def drawn():
    key = jax.random.key(0)
    inputs = memory.make_inputs(key, spec, time=time, **sizes)
    if "implementation" in options:  # a kernel
      products = ("query", "key", "value")
      narrow = {n: getattr(inputs, n).astype(jnp.bfloat16) for n in products}
      inputs = inputs._replace(**narrow)
    return inputs, memory.make_state(key, spec, **sizes | {"batch": 1})

  # Nothing is computed. The state is closed over, so it has numbers.
  inputs, fresh = jax.eval_shape(drawn)
  fresh = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), fresh)
  mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
  rows = PartitionSpec("data")

  def run(inputs, ids):
    reset = None if ids is None else FRESH
    call = {"segment_ids": ids, "reset_state": reset} | options
    return memory.op.chunk(fresh, inputs, spec=spec, **call)[1]

  def loss(inputs):
    sharded = jax.shard_map(run, mesh=mesh, in_specs=rows, out_specs=rows)
    return jnp.sum(sharded(inputs, ids).astype(jnp.float32))

  jax.eval_shape(jax.grad(loss, allow_int=True), inputs)


@pytest.mark.parametrize("packed", rotation.cases([False, True], [True]))
@pytest.mark.parametrize(
  ("name", "spec"),
  rotation.cases(
    [(name, x) for name, m in memories.MEMORIES.items() for x in m.specs],
    [(x, next(iter(memories.MEMORIES[x].specs))) for x in MESHES],
  ),
)
def test_in_the_callers_shard_map(name, spec, packed):
  """JAX checks there what varies over the mesh, and loops must agree."""
  memory = memories.MEMORIES[name]
  traced_in_a_shard_map(memory, memory.specs[spec], IDS if packed else None)


@pytest.mark.parametrize(
  ("name", "sweeps"),
  [("trellis", solver.Solver(method="sweeps")), ("lattice", "sweeps")],
)
def test_sweeps_in_the_callers_shard_map(name, sweeps):
  memory = memories.MEMORIES[name]
  tiling = memory.op.Tiling(solver=sweeps)
  traced_in_a_shard_map(memory, memory.specs["token"], None, tiling=tiling)


def test_numbers_in_the_callers_shard_map():
  case = op_cases.CASES["gated_delta_rule"]
  arrays = case.arrays(jax.tree.map(lambda x: x[:, :TIME], case.inputs()))
  mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
  rows = PartitionSpec("data")

  def run(arrays, ids):
    return case(arrays, segment_ids=ids)[0]

  sharded = jax.shard_map(run, mesh=mesh, in_specs=rows, out_specs=rows)
  found = jax.jit(sharded)(arrays, IDS)
  expected = jax.jit(run)(arrays, IDS)
  errors.assert_close(found, expected, tolerances.SHARDED, "y")


@pytest.mark.parametrize("packed", rotation.cases([False, True], [False]))
@pytest.mark.parametrize(
  ("name", "fields"),
  rotation.cases(
    [
      ("delta_rule", {}),
      ("linear_attention", {}),
      ("trellis", {"num_slots": 64, "chunk_size": 64}),
      ("lattice", {"num_slots": 64, "chunk_size": 64}),
      ("lattice", {"num_slots": 64, "gradient_at": "token"}),
      ("key_value_means", {"chunk_size": 128}),
      ("tensor_cache", {"window_size": 128, "chunk_size": 64}),
    ],
    [("linear_attention", {})],
  ),
)
def test_tpu_kernels_in_the_callers_shard_map(name, fields, packed):
  """They say over which axes their results vary."""
  memory = memories.MEMORIES[name]
  ids = jnp.ones((2, 128), jnp.int32).at[:, 70:].set(2) if packed else None
  sizes = {"batch": 2, "heads": 2, "key_dim": 128, "value_dim": 128}
  with tpu.compiled("v6e"):
    traced_in_a_shard_map(
      *(memory, memory.op.Spec(**fields), ids, sizes, 128),
      implementation="mosaic_tpu",
    )


def test_gpu_kernels_in_the_callers_shard_map():
  """They do not, and ask not to be checked."""
  q = jnp.ones((2, 128, 1, 128), jnp.bfloat16)
  g = -jnp.ones((2, 128, 1))
  mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
  rows = PartitionSpec("data")

  def run(implementation, check):
    call = functools.partial(gated_delta_rule, implementation=implementation)
    with gpu.lowered():
      return jax.eval_shape(
        jax.shard_map(
          lambda q, g: call(q, q, q, g=g, beta=-g)[0],
          mesh=mesh,
          in_specs=rows,
          out_specs=rows,
          check_vma=check,
        ),
        q,
        g,
      )

  run("mosaic_gpu", False)
  with pytest.raises(NotImplementedError, match="needs check_vma=False"):
    run("mosaic_gpu", True)
  run(("mosaic_gpu", "xla_chunked"), True)


@CASES
def test_nans_and_checks(name):
  """Packed rows, some decays of -inf: no operation makes a nan on the way."""
  call, state, inputs = case_of(name)
  if getattr(inputs, "log_decay", None) is not None:
    decay = np.array(inputs.log_decay)
    decay[:, 1] = -np.inf
    inputs = inputs._replace(log_decay=decay)
  loss = loss_of(call, state, inputs, IDS)
  with jax.debug_nans(True), jax.enable_checks(True):
    found = jax.jit(jax.value_and_grad(loss))(inputs.value)
  errors.assert_finite(found, name)


@CASES
def test_gradient_of_a_gradient(name):
  """As of the definition; of packed rows as well, or one line."""
  call, state, inputs = case_of(name)

  def second(ids, implementation):
    loss = loss_of(call, state, inputs, ids, implementation=implementation)
    first = jax.grad(loss)
    return jax.jit(jax.grad(lambda value: jnp.sum(jnp.sin(first(value)))))

  found, expected = (
    second(None, form)(inputs.value) for form in (None, "reference")
  )
  errors.assert_close(found, expected, tolerances.GRADIENT["float32"], name)
  packed = second(IDS, None)
  if name in SECOND_OF_PACKED:
    packed.lower(inputs.value)
    return
  with pytest.raises(TypeError, match="gradient of a gradient") as raised:
    packed.lower(inputs.value)
  assert str(raised.value) == derivative.SECOND
  assert "\n" not in derivative.SECOND


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["decoding", "encoding"])
def test_gradient_of_a_gradient_per_token(objective):
  """Refused where the solver's gradient is made by hand, else right.

  More tokens than a tile of the solver has: the memory before it has a part.
  """
  q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 11, 1, 4))
  rate = jnp.full((1, 11, 1), 0.3)
  options = {"gradient_at": "token", "objective": objective}

  def second(form):
    def loss(k):
      run = functools.partial(lattice, implementation=form)
      y, _ = run(q, k, v, g=-rate, write_rate=rate, **options)
      return jnp.sum(y * y)

    first = jax.grad(loss)
    return jax.jit(jax.grad(lambda k: jnp.sum(jnp.sin(first(k)))))(k)

  if objective == "decoding":
    with pytest.raises(TypeError, match="gradient of a gradient"):
      second(None)
    return
  bound = tolerances.GRADIENT["float32"]
  errors.assert_close(second(None), second("reference"), bound, objective)


def test_the_table_in_the_docs():
  """Names every op; whatever is not refused is tested here or where it says."""
  text = DOCS.read_text()
  for lines, names in (
    ("Packed rows have a gradient of a gradient in", SECOND_OF_PACKED),
    ("Forward mode is there in", op_cases.FORWARD_MODE),
  ):
    said = text.partition(lines)[2].partition(".")[0]
    assert set(re.findall("`([a-z_0-9]+)`", said)) == set(names), lines


def exported(call, arrays, axis, name):
  """What the export of `call` gives, made for any size of an axis."""
  (size,) = export.symbolic_shape(name)

  def shape(x):
    sizes = *x.shape[:axis], size, *x.shape[axis + 1 :]
    return jax.ShapeDtypeStruct(sizes, x.dtype)

  return export.export(jax.jit(call))(jax.tree.map(shape, arrays)).call(arrays)


@CASES
def test_exported_for_any_batch(name):
  """By `jax.export`, whose symbols are no numbers."""
  case = op_cases.CASES[name]
  arrays = case.arrays(case.inputs())
  found = exported(case, arrays, 0, "batch")
  errors.assert_close(found, jax.jit(case)(arrays), 1e-5, name)


@CASES
def test_exported_for_any_time(name):
  """By the reference. Other forms refuse; a fresh state may need a length."""
  case = op_cases.CASES[name]
  arrays = case.arrays(case.inputs())
  calls = [case]
  if name == "softmax_attention":
    with pytest.raises(
      ValueError, match=r"time=time is symbolic.*pass length= or"
    ):
      exported(case, arrays, 1, "time")
    length = arrays["q"].shape[1]
    _, state = case(arrays, length=2 * length)
    calls = [
      functools.partial(case, state=state),
      functools.partial(case, length=length),
    ]
  for call in calls:
    found = exported(call, arrays, 1, "time")
    errors.assert_close(found, jax.jit(call)(arrays), 1e-5, name)
  with pytest.raises(NotImplementedError, match="time=time is symbolic"):
    form = functools.partial(calls[-1], implementation="xla_chunked")
    exported(form, arrays, 1, "time")
