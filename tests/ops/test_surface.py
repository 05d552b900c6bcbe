"""Public names: what there is to import, and what it says of itself."""

import functools
import importlib
import inspect
import pkgutil
import subprocess
import sys
import typing

import jax
import jax.numpy as jnp
import numpy as np
import op_cases
import pytest
from jax.sharding import Mesh

import memcomp_kernels
from memcomp_kernels import (
  contract,
  dispatch,
  gated_delta_rule,
  shapes,
  trellis,
)
from memcomp_kernels.parallel import shard
from memcomp_kernels.testing import errors, tolerances

SHARED = {"math", "chunking", "parallel", "pallas_tpu", "pallas_gpu"}
PACKAGES = [
  f"memcomp_kernels.{module.name}"
  for module in pkgutil.iter_modules(memcomp_kernels.__path__)
  if module.ispkg and module.name not in SHARED
]


@pytest.mark.parametrize("name", ["memcomp_kernels", *PACKAGES])
def test_every_public_name_is_there(name):
  package = importlib.import_module(name)
  for public in package.__all__:
    if not hasattr(package, public):
      importlib.import_module(f"{name}.{public}")


def test_every_memory_is_an_op_by_the_name_of_its_folder():
  folders = {name.split(".")[1] for name in PACKAGES} - {"testing"}
  assert folders <= set(memcomp_kernels.__all__)
  for folder in folders:
    op = getattr(memcomp_kernels, folder)
    assert isinstance(op, memcomp_kernels.Op)
    assert op.name == folder
    for form in ("chunk", "step", "reference", "init_state"):
      assert callable(getattr(op, form))


def test_ops_and_folders_of_one_name():
  import memcomp_kernels.trellis.reference
  from memcomp_kernels.trellis import reference

  assert memcomp_kernels.trellis is trellis
  assert reference.step is trellis.token_step
  assert reference is sys.modules["memcomp_kernels.trellis.reference"]


def test_pallas_is_imported_when_it_is_needed():
  code = """
import sys, memcomp_kernels
assert "jax.experimental.pallas" not in sys.modules
"""
  subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", op_cases.CASES)
def test_an_op_tells_its_arguments(name):
  """`help` and `inspect.signature`: arrays with shapes, Spec fields, options."""
  op = op_cases.CASES[name].op
  parameters = inspect.signature(op).parameters
  for array in op_cases.arguments.names(op):
    annotation = parameters[array].annotation
    assert typing.get_args(annotation)[0] is jax.Array
    assert annotation.__metadata__[0].split()[:2] == ["batch", "time"]
  for name, field in inspect.signature(op.Spec).parameters.items():
    if name not in op.fixed:
      assert parameters[name].default == field.default
  for option in ("state", "segment_ids", "reset_state", "implementation"):
    assert parameters[option].default is None
  text = inspect.getdoc(op)
  for name in parameters:
    assert f"{name}:" in text or name in (*op.options, "initial_state"), name
  assert max(map(len, text.splitlines())) <= 80


def test_the_signature():
  assert str(inspect.signature(gated_delta_rule)).startswith(
    "(q: Annotated[jax.Array, 'batch time heads key_dim'],"
    " k: Annotated[jax.Array, 'batch time heads key_dim'],"
    " v: Annotated[jax.Array, 'batch time heads value_dim'],"
    " g: Annotated[jax.Array, 'batch time heads'],"
    " beta: Annotated[jax.Array, 'batch time heads'], *,"
    " scale: float | None = None, state: "
  )


def test_names_of_arrays():
  """Short, long, by position; what is None is not given."""
  q, v = jnp.ones((1, 2, 1, 3)), jnp.ones((1, 2, 1, 4))
  g = -jnp.ones((1, 2, 1))

  def total(*arrays, **call):
    return jax.jit(lambda: gated_delta_rule(*arrays, **call)[0].sum())()

  expected = total(q, q, v, g, -g)
  assert total(q=q, k=q, v=v, g=g, beta=-g) == expected
  assert total(query=q, key=q, value=v, log_decay=g, write_rate=-g) == expected
  assert total(q, q, v, log_decay=g[..., None], beta=-g, g=None) == expected


def test_what_comes_back():
  """Outputs and the new state, unless it is said that none is wanted."""
  q, v = jnp.ones((1, 2, 1, 3)), jnp.ones((1, 2, 1, 4))
  ovq = functools.partial(memcomp_kernels.ovq, max_rows=4, chunk_size=2)
  y, state = jax.eval_shape(ovq, q, q, v)
  assert (y.shape, type(state)) == (v.shape, memcomp_kernels.ovq.State)
  y, none = ovq(q, q, v, output_final_state=False, implementation="reference")
  assert y.shape == v.shape
  assert none is None


def test_a_fresh_state_may_have_options():
  """A learned first memory, which new segments start from as well."""
  case = op_cases.CASES["gated_slot_attention"]
  inputs, arrays = case.inputs(), case.arrays(case.inputs())
  ids = jnp.ones((2, op_cases.TIME), jnp.int32).at[:, 9:].set(2)
  memory = np.random.default_rng(0).standard_normal(
    (2, case.spec.num_slots, inputs.key.shape[-1]), np.float32
  )
  call = {"segment_ids": ids, "implementation": "reference"}

  def total(memory):
    y = case(arrays, key_memory=memory, **call)[0]
    return jnp.sum(y[:, 9:]), y

  gradient, y = jax.jit(jax.grad(total, has_aux=True))(memory)
  fresh = case.fresh()
  fresh = fresh._replace(key_memory=fresh.key_memory + memory)
  call = {"spec": case.spec, "segment_ids": ids, "reset_state": fresh}
  _, expected = jax.jit(lambda: case.op.reference(fresh, inputs, **call))()
  errors.assert_close(y, expected, tolerances.VALUE["float32"], "y")
  assert np.any(gradient != 0)


def test_an_ordered_list_of_implementations(monkeypatch):
  """The first that can do the call is taken; the platform's order without."""
  q, v = jnp.ones((1, 2, 1, 3)), jnp.ones((1, 2, 1, 4))
  g = -jnp.ones((1, 2, 1))
  ran = []
  functions = gated_delta_rule.implementations.functions
  for name in ("reference", "xla_chunked"):
    right = functions[name]

    def counted(*arguments, name=name, right=right, **keywords):
      ran.append(name)
      return right(*arguments, **keywords)

    monkeypatch.setitem(functions, name, counted)

  def chosen(implementation):
    ran.clear()
    jax.eval_shape(
      lambda: gated_delta_rule(q, q, v, g, -g, implementation=implementation)
    )
    return ran

  assert chosen(None) == ["xla_chunked"]
  assert chosen("reference") == ["reference"]
  assert chosen(("mosaic_tpu", "reference", "xla_chunked")) == ["reference"]
  assert chosen(["library_gpu", "xla_chunked"]) == ["xla_chunked"]


def test_kernels_that_are_named_are_there():
  for case in op_cases.CASES.values():
    for name, function in case.op.implementations.functions.items():
      if isinstance(function, dispatch.Kernel):
        module = importlib.import_module(function.module)
        runs = "chunk" if function.xla is None else "ENGINE"
        assert hasattr(module, runs), name
        assert callable(module.unsupported), name


def test_ops_compile_and_take_static_arguments():
  q, v = jnp.ones((1, 2, 1, 3)), jnp.ones((1, 2, 1, 4))
  call = jax.jit(memcomp_kernels.ovq, static_argnames=("max_rows", "growth"))
  y, state = call(q, q, v, max_rows=4, growth="linear")
  assert (y.shape, state.keys.shape) == (v.shape, (1, 1, 4, 3))


def test_a_donated_state():
  case = op_cases.CASES["trellis"]
  arrays = case.arrays(case.inputs())
  call = jax.jit(lambda s: case(arrays, state=s), donate_argnums=0)
  _, state = call(case.fresh())
  call(state)


def test_a_fresh_state_has_arrays_of_its_own():
  """Donating it leaves the first memory that it was made of."""
  memory = jnp.ones((1, 2, 3, 4))
  state = memcomp_kernels.trellis.init_state(
    memcomp_kernels.trellis.Spec(num_slots=3),
    batch=1,
    heads=2,
    key_dim=4,
    value_dim=4,
    key_memory=memory,
  )
  jax.jit(lambda state: state, donate_argnums=0)(state)
  assert not memory.is_deleted()


def test_fresh_over_a_mesh():
  """`FRESH` is made of all heads before rows and heads are cut.

  Lattice's first memory differs from head to head.
  """
  case = op_cases.CASES["lattice"]
  inputs, state = case.inputs(), case.fresh()
  ids = jnp.ones((2, op_cases.TIME), jnp.int32).at[:, 7:].set(2)
  call = {"spec": case.spec, "segment_ids": ids}
  chunk = shard.shard_chunk(
    case.op.reference, batch_axes=("data",), head_axes=("model",)
  )

  def run():
    return chunk(state, inputs, **call, reset_state=contract.FRESH)[1]

  expected = jax.jit(run)()
  mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
  with jax.set_mesh(mesh):
    errors.assert_close(jax.jit(run)(), expected, tolerances.SHARDED, "y")
    with pytest.raises(ValueError, match="lattice: segment_ids with a state"):
      chunk(state, inputs, **call)


def test_words_of_shapes():
  """What an axis may be, in arrays and in errors."""
  check = shapes.Check("op", gated_delta_rule.Spec())
  check.sizes["heads"] = 4
  for axes, shape in (
    (("batch", "heads"), (3, 4)),
    (("1|2", "7"), (2, 7)),
  ):
    check.array("x", axes, jnp.zeros(shape))
  with pytest.raises(ValueError, match=r"expected \[batch, heads=4\]"):
    check.array("x", ("batch", "heads"), jnp.zeros((3, 5)))
  state = shapes.zeros(
    gated_delta_rule.State,
    gated_delta_rule.Spec(),
    {"batch": 1, "heads": 2, "key_dim": 3, "value_dim": 4},
    jnp.float32,
  )
  assert state.memory.shape == (1, 2, 3, 4)
  assert state.segment_id.dtype == jnp.int32
  with pytest.raises(ValueError, match="value_dim is missing"):
    gated_delta_rule.init_state(batch=1, heads=2, key_dim=3)
