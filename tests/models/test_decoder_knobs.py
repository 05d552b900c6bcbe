"""Options of the decoder and of its Trellis: each does what it says.

Recomputation changes nothing, ablations do, and bad fields are named.
"""

import decoder_cases as cases
import jax
import jax.numpy as jnp
import pytest
import rotation
from flax import nnx

from memcomp.layers import trellis
from memcomp_kernels import trellis as trellis_op
from memcomp_kernels.testing import errors


def loss_and_gradient(config):
  graph, params = nnx.split(cases.build(config))

  def loss(params):
    return jnp.mean(jnp.sin(nnx.merge(graph, params)(cases.tokens(2, 20))))

  return jax.jit(jax.value_and_grad(loss))(params)


@pytest.fixture(scope="module")
def base():
  return loss_and_gradient(cases.config())


@pytest.mark.parametrize(
  "remat",
  rotation.cases(["block", "mixer_out", "memories", "dots"], ["memories"]),
)
@pytest.mark.parametrize(
  "name",
  # What they keep differs.
  rotation.cases(
    ["linear_attention", "trellis", "key_value_means"], ["linear_attention"]
  ),
)
def test_remat_changes_nothing(name, remat):
  kept, again = (
    loss_and_gradient(cases.config(name, remat=x)) for x in ("none", remat)
  )
  errors.assert_close(again, kept, 1e-5)


@pytest.mark.slow
def test_memories_that_are_kept_are_not_run_again():
  def scans(remat):
    graph, params = nnx.split(cases.build(cases.config(remat=remat)))

    def loss(params):
      return jnp.sum(nnx.merge(graph, params).hidden(cases.tokens(2, 20))[0])

    return str(jax.make_jaxpr(jax.grad(loss))(params)).count("scan[")

  # Of tiles: forward, and backward; else forward once more.
  assert scans("memories") < scans("mixer_out") == scans("block")


KNOBS = {
  "phi": [{"phi": p} for p in ("identity", "silu", "softmax", "l2", "l2_silu")],
  "read": [{"read_activation": f} for f in ("l2_silu", "softmax")],
  "slots": [{"num_slots": 3}, {"num_slots": 12}],
  "token": [{"gradient_at": "token"}],
  "forget": [{"forget_gate": False}],
  "gates": [{"separate_gates": True}],
  "readout": [{"value_readout_phi": True}],
  "order": [{"first_order": True}],
  "memory": [{"learned_memory": False}],
  "norm": [{"normalize": "none"}, {"normalize": "qk"}, {"head_norm": True}],
  "convolution": [{"convolution_width": 0}, {"convolve_value": True}],
}


# All take the same way into the model, as remat does in every run.
COMPUTED = ()


@pytest.mark.parametrize(
  "change",
  [
    pytest.param(
      change, marks=[pytest.mark.slow] * (index > 0 or name not in COMPUTED)
    )
    for name, group in KNOBS.items()
    for index, change in enumerate(group)
  ],
  ids=str,
)
def test_every_ablation_is_one_override(change, base):
  """Each changes the function or its gradient, and nothing breaks."""
  value, gradient = loss_and_gradient(cases.config(mixer=change))
  errors.assert_finite((value, gradient))

  def of_keys(gradient):
    return gradient["layers"]["0"]["mixer"]["query_key"]["kernel"][...]

  same = errors.relative_rms(of_keys(gradient), of_keys(base[1])) < 1e-4
  assert value != base[0] or not same


@pytest.mark.parametrize(
  ("where", "change"),
  [
    ("model", {"d_model": 0}),
    ("model", {"dtype": "float16"}),
    ("model", {"remat": "all"}),
    ("model", {"embedding_convolution": 1}),
    ("model", {"init_std": 0.0}),
    ("mixer", {"heads": -1}),
    ("mixer", {"phi": "relu"}),
    ("mixer", {"normalize": "all"}),
    ("mixer", {"decay_init": 1.0}),
    ("mixer", {"write_rate_init": 2.0}),
    ("mixer", {"convolution_width": 1}),
    ("mixer", {"learned_memory": False, "phi_eps": 1e-6}),
  ],
  ids=str,
)
def test_bad_fields_are_named(where, change):
  name = next(iter(change))
  with pytest.raises(ValueError, match=f"{name}="):
    if where == "model":
      cases.build(cases.config(**change))
    else:
      cases.build(cases.config(mixer=change))


def test_the_layer_repeats_the_kernels_defaults():
  assert trellis.TrellisConfig().spec() == trellis_op.Spec()
