"""What docs/use.md shows of layers, as a stranger would type it.

The bodies of these functions are the code blocks of README.md and docs/use.md;
`test_quoted.py` holds the pages to them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rotation
from flax import nnx
from jax.sharding import AxisType

X = np.random.default_rng(1).standard_normal((2, 16, 512)).astype(np.float32)

# What the examples are compared with; their own calls are as one would type.
call = nnx.jit(lambda layer, x: layer(x))


def close(found, expected, tolerance=1e-5):
  for a, b in zip(
    jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
  ):
    a, b = (np.asarray(jax.device_get(v), np.float64) for v in (a, b))
    assert a.shape == b.shape
    scale = max(np.abs(b).max(initial=0), 1e-30)
    assert np.abs(a - b).max(initial=0) <= tolerance * scale


def test_three_lines():
  x = X
  # quoted: three lines
  from flax import nnx

  from memcomp.layers import Trellis

  layer = Trellis(512, heads=8, rngs=nnx.Rngs(0))
  y = layer(x)  # [batch, time, 512] to the same
  # end
  assert y.shape == x.shape and y.dtype == x.dtype
  assert np.isfinite(y).all()


def test_state():
  from memcomp.layers import Trellis

  layer, x = Trellis(512, heads=8, rngs=nnx.Rngs(0)), X
  # quoted: state
  state = layer.init_state(batch=2)
  first, state = layer(x[:, :10], state=state)  # the state after 10 tokens
  y_t, state = layer.step(x[:, 10], state)  # one token, [batch, 512]
  rest, state = layer(x[:, 11:], state=state)
  # end
  whole = jnp.concatenate([first, y_t[:, None], rest], axis=1)
  close(whole, call(layer, x))


def test_packed_rows():
  from memcomp.layers import GatedDeltaNet

  layer, x = GatedDeltaNet(512, rngs=nnx.Rngs(0)), X
  # quoted: packed rows
  segment_ids = jnp.array(
    [[1] * 6 + [2] * 10, [1] * 12 + [0] * 4]
  )  # 0: padding
  y = layer(x, segment_ids=segment_ids)
  # end
  close(y[0, 6:], call(layer, x[:1, 6:])[0])
  close(y[1, :12], call(layer, x[1:, :12])[0])


@pytest.mark.slow
def test_training():
  from memcomp.layers import Trellis

  x = X[:, :, :32]
  # quoted: training
  layer = Trellis(32, heads=4, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)

  @nnx.jit
  def train_step(layer, optimizer, x):
    def loss(layer):
      return jnp.mean((layer(x) - jnp.roll(x, 1, axis=1)) ** 2)

    value, gradient = nnx.value_and_grad(loss)(layer)
    optimizer.update(layer, gradient)
    return value

  losses = [train_step(layer, optimizer, x) for _ in range(20)]
  # end
  assert losses[-1] < 0.95 * losses[0]


@pytest.mark.slow
def test_a_mesh_of_your_own():
  from memcomp.layers import Trellis

  x = jax.random.normal(jax.random.key(1), (4, 16, 32))
  # quoted: mesh
  from memcomp import sharding

  mesh = jax.make_mesh(
    (2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
  )
  rules = sharding.rules(mesh, batch="data", heads="model")
  layer = Trellis(32, heads=4, rngs=nnx.Rngs(0), rules=rules)
  rules.place(layer)  # lays the parameters out
  x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
  y = nnx.jit(lambda layer, x: layer(x))(layer, x)
  # end
  kernel = layer.value.kernel[...]
  assert kernel.sharding.spec == jax.P(None, "model")
  assert y.sharding.is_equivalent_to(jax.NamedSharding(mesh, jax.P("data")), 3)
  close(y, call(Trellis(32, heads=4, rngs=nnx.Rngs(0)), x))


@pytest.mark.slow
def test_linen():
  from memcomp.layers import Trellis

  x = X[..., :32]
  # quoted: linen
  from flax import linen as nn
  from flax.nnx import bridge

  class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
      mixer = bridge.to_linen(Trellis, 32, heads=4, name="mixer")
      return x + mixer(nn.LayerNorm()(x))

  variables = Block().init(jax.random.key(0), x)
  y = Block().apply(variables, x)
  # end
  layer = Trellis(32, heads=4, rngs=nnx.Rngs(0))
  nnx.update(layer, nn.unbox(variables)["params"]["mixer"])
  norm = {"params": variables["params"]["LayerNorm_0"]}
  close(y, x + call(layer, nn.LayerNorm().apply(norm, x)))
  gradient = jax.jit(jax.grad(lambda v: Block().apply(v, x).sum()))(variables)
  leaves = jax.tree.leaves(gradient)
  assert all(np.isfinite(g).all() for g in leaves)
  assert sum(float(jnp.abs(g).sum()) for g in leaves) > 0


def test_plain_jax():
  from memcomp.layers import GatedDeltaNet

  x = X[..., :32]
  layer = GatedDeltaNet(32, heads=2, rngs=nnx.Rngs(0))
  # quoted: plain jax
  graphdef, params = nnx.split(layer)  # params is a pytree of arrays

  @jax.jit
  def apply(params, x):
    return nnx.merge(graphdef, params)(x)

  gradient = jax.grad(lambda params: apply(params, x).sum())(params)
  # end
  close(apply(params, x), call(layer, x))
  assert jax.tree.structure(gradient) == jax.tree.structure(params)


@pytest.mark.slow
def test_equinox():
  from memcomp.layers import Trellis

  x = X[..., :32]
  layer = Trellis(32, heads=4, rngs=nnx.Rngs(0))
  # quoted: equinox
  import equinox as eqx

  class Layer(eqx.Module):
    params: nnx.State
    graphdef: nnx.GraphDef = eqx.field(static=True)

    def __call__(self, x):
      return nnx.merge(self.graphdef, self.params)(x)

  graphdef, params = nnx.split(layer)
  module = Layer(params, graphdef)
  y = eqx.filter_jit(module)(x)
  gradient = eqx.filter_grad(lambda module: module(x).sum())(module)
  # end
  close(y, call(layer, x))
  expected = nnx.jit(nnx.grad(lambda layer: layer(x).sum()))(layer)
  close(gradient.params, expected)


@pytest.mark.slow
@pytest.mark.parametrize("remat", rotation.cases([False, True], [True]))
def test_scan_over_layers(remat):
  from memcomp.layers import Trellis

  x = X[..., :32]

  # quoted: scan over layers
  @nnx.vmap(in_axes=0)
  def make(rngs):
    return Trellis(32, heads=4, rngs=rngs)

  layers = make(nnx.Rngs(0).split(3))

  @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
  @nnx.remat
  def run(x, layer):
    return x + layer(x)

  y = run(x, layers)
  # end
  if not remat:

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x, layer):
      return x + layer(x)

    y = run(x, layers)
  graphdef, params = nnx.split(layers)
  expected = x
  for i in range(3):
    one = nnx.merge(graphdef, jax.tree.map(lambda p, i=i: p[i], params))
    expected = expected + call(one, expected)
  close(y, expected)


@pytest.mark.slow
def test_vmap_and_donation():
  from memcomp.layers import Trellis

  x = X[..., :32]
  layer = Trellis(32, heads=4, rngs=nnx.Rngs(0))
  # quoted: vmap and donation
  many = jax.vmap(layer)(jnp.stack([x, 2 * x]))
  step = jax.jit(lambda layer, x, state: layer.step(x, state), donate_argnums=2)
  state = layer.init_state(2)
  for t in range(3):
    y, state = step(layer, x[:, t], state)
  # end
  close(many, jnp.stack([call(layer, x), call(layer, 2 * x)]))
  close(y, call(layer, x)[:, 2])
