"""Every memory, every Spec, every implementation, under the one contract."""

import functools

import jax
import numpy as np
import pytest

from memcomp_kernels import dispatch
from memcomp_kernels.testing import checks, memories, packed_checks, subjects

SLOW = pytest.mark.slow

ALL = [
  (memory, name, implementation)
  for memory in memories.MEMORIES.values()
  for name in memory.specs
  for implementation in memory.op.implementations.functions
  if implementation not in dispatch.KERNELS
]


# Coprime to the chunk sizes: pieces end at every offset into a chunk.
PIECE, PIECES = 5, 9

# Checks of one subject use as many tokens where they can, in one row or in
# packed rows: nearly all of their time goes to compiling, and that is shared.
TIME = PIECE * PIECES


def packed_rows():
  """Rows that meet every case: a state's segment goes on, or does not."""
  time = 48
  rows = np.zeros((5, time), np.int32)
  rows[0] = 1  # continues the state's segment
  rows[1, 2:20], rows[1, 25:] = 1, 1  # padding inside a segment
  rows[2, :11], rows[2, 11:13], rows[2, 13:40] = 4, 1, 9
  rows[3] = np.arange(time) % 2 + 1  # a new segment every token
  # The same, but for two that go on from a page of tiles to the next: the
  # first with tiles of 16 tokens, the second with tiles of 8.
  rows[4] = rows[3]
  rows[4, 4:24], rows[4, 24:34] = 5, 6
  return rows


PACKED = packed_rows()
FEW = PACKED[[0, 1, 2, 0, 1]]  # segments: no row has many

# Those that the library is for.
FOUR = ("trellis", "lattice", "key_value_means", "tensor_cache")

FIRST = tuple(
  f"{name}-{memory.typical[0]}" for name, memory in memories.MEMORIES.items()
)
FIRST_OF_FOUR = tuple(name for name in FIRST if name.startswith(FOUR))
# And those that solve a system for each tile.
MAIN = (*FIRST, "trellis-token", "lattice-token")

# Others whose segments may start inside a chunk.
BY_CHUNK = tuple(
  name
  for name in FIRST
  if name.startswith(("ovq", "infini_attention", "test_time_training"))
)

# What no other test takes through the chunk form; some of it in every run.
OPTIONS = (
  "trellis-chunk-readout-phi",
  "trellis-chunk-softmax",
  "lattice-chunk-delta",
  "lattice-token-similarity",
  "infini_attention-token",
)

# Of the others slow tests look at gradients of packed rows.
PACKED_GRADIENT = ("trellis", "lattice", "tensor_cache")


def subjects_of(keep, *, often=None):
  """Parametrizes a test by those of ALL that `keep` takes.

  Args:
    keep: (memory, name of a Spec, implementation) -> bool.
    often: the memories, or their Specs by `memory-spec`, that are checked every
      time, the others by slow tests; None for all.
  """

  def marks(memory, name):
    always = often is None or {memory.name, f"{memory.name}-{name}"} & set(
      often
    )
    return () if always and name not in memory.composed else SLOW

  return pytest.mark.parametrize(
    "subject",
    [
      pytest.param(
        subjects.Subject(memory, memory.specs[name], implementation, keep=True),
        id=f"{memory.name}-{name}-{implementation}",
        marks=marks(memory, name),
      )
      for memory, name, implementation in ALL
      if keep(memory, name, implementation)
    ],
  )


def typical_forms(memory, name, implementation):
  """What does not depend on the rest of the Spec: layout, packing, rounding."""
  return implementation != "reference" and name in memory.typical


def decaying_forms(memory, name, implementation):
  return typical_forms(memory, name, implementation) and decays(
    memory, memory.specs[name]
  )


@functools.cache
def decays(memory, spec):
  subject = subjects.Subject(memory, spec, "reference")
  inputs = jax.eval_shape(lambda: subject.inputs(1))
  return getattr(inputs, "log_decay", None) is not None


def first_forms(memory, name, implementation):
  return implementation != "reference" and name == memory.typical[0]


def further_forms(memory, name, implementation):
  return implementation != "reference" and name in memory.typical[1:]


def other_forms(memory, name, implementation):
  return implementation != "reference" and name not in memory.typical


def options(memory, name, implementation):
  return implementation != "reference" and f"{memory.name}-{name}" in OPTIONS


def typical_reference(memory, name, implementation):
  """The reference follows the rules of packing by `contract.scan` alone."""
  return implementation == "reference" and name == memory.typical[0]


def smooth_forms(memory, name, implementation):
  """Those with a reference that is differentiable; `test_truth` compiles it."""
  smooth = memory.specs if memory.smooth is None else memory.smooth
  names = (*memory.typical, *tuple(memory.specs)[-1:])
  return implementation != "reference" and name in smooth and name in names


def handed_off(memory, name, implementation):
  """Those of the typical, and where more than a state is summed up."""
  also = {"trellis": "token-eps", "lattice": "chunk-long-sparse"}
  return implementation != "reference" and (
    name in memory.typical or name == also.get(memory.name)
  )


@subjects_of(typical_forms, often=MAIN)
def test_truth(subject):
  checks.check_truth(subject, TIME)


@SLOW
@subjects_of(other_forms)
def test_truth_of_other_specs(subject):
  checks.check_truth(subject, TIME)


@subjects_of(options, often=("lattice-token-similarity",))
def test_values_of_options(subject):
  checks.check_values(subject, TIME)


@SLOW
@subjects_of(typical_forms)
@pytest.mark.parametrize("time", [1, 63, 64, 100])
def test_lengths(subject, time):
  checks.check_values(subject, time)


@subjects_of(smooth_forms, often=FIRST)
def test_finite_differences(subject):
  checks.check_finite_differences(subject, TIME)


@subjects_of(typical_forms, often=FIRST_OF_FOUR)
def test_precision(subject):
  checks.check_precision(subject, "bfloat16", TIME)


@SLOW
@subjects_of(typical_forms)
def test_precision_in_float32(subject):
  checks.check_precision(subject, "float32", TIME)


@SLOW
@subjects_of(typical_reference, often=FOUR)
def test_precision_of_the_reference(subject):
  checks.check_precision(subject, "bfloat16", TIME)


@subjects_of(handed_off, often=FIRST)
def test_hand_off_at_every_offset(subject):
  checks.check_hand_off(subject, PIECE, PIECES, with_gradients=False)


# By the chain rule: `test_truth` compares gradients of states, first and last.
@SLOW
@subjects_of(handed_off)
def test_gradients_through_hand_offs(subject):
  checks.check_hand_off(subject, PIECE, PIECES)


# `test_truth` holds the forms, and their states, to the reference.
@SLOW
@subjects_of(typical_reference)
def test_hand_off_of_the_reference(subject):
  checks.check_hand_off(subject, PIECE, PIECES, with_gradients=False)


# By the chain rule: `test_truth` compares these gradients of states with the forms'.
@SLOW
@subjects_of(typical_reference)
def test_gradients_through_hand_offs_of_the_reference(subject):
  checks.check_hand_off(subject, PIECE, PIECES)


# Of the reference; the forms are held to it on packed rows below.
@SLOW
@subjects_of(typical_reference)
@pytest.mark.parametrize(
  ("lengths", "padding"),
  [([3, 21, 16, 9], 0), ([5, 1, 20], 3), ([1] * 12, 1)],
  ids=["split", "padded", "single tokens"],
)
def test_packing(subject, lengths, padding):
  packed_checks.check_packing(subject, lengths, padding)


# The decoder's tests hold a mixer of each kind to it, all of them if slow.
@subjects_of(typical_forms, often=(*FIRST_OF_FOUR, *BY_CHUNK))
@pytest.mark.parametrize("rows", [FEW, PACKED], ids=["few", "many"])
def test_packed_against_reference(subject, rows):
  packed_checks.check_packed_against_reference(
    subject, rows, in_two=False, gradient=subject.memory.name in PACKED_GRADIENT
  )


@SLOW
@subjects_of(first_forms)
def test_packed_rows_in_two_calls(subject):
  packed_checks.check_packed_against_reference(subject, PACKED)


@SLOW
@subjects_of(further_forms)
def test_packed_rows_of_further_specs_in_two_calls(subject):
  packed_checks.check_packed_against_reference(subject, PACKED)


@SLOW
@subjects_of(other_forms)
def test_packed_rows_of_other_specs(subject):
  packed_checks.check_packed_against_reference(subject, PACKED, in_two=False)


# So do the decoder's tests, to the last bit as well.
@subjects_of(typical_forms, often=FIRST_OF_FOUR)
def test_padding(subject):
  packed_checks.check_padding(
    subject,
    PACKED.shape[1],
    len(PACKED),
    packed_program=subject.memory.name in PACKED_GRADIENT,
  )


@SLOW
@subjects_of(typical_reference)
def test_padding_of_the_reference(subject):
  packed_checks.check_padding(subject, PACKED.shape[1], len(PACKED))


@subjects_of(typical_forms, often=MAIN)
def test_causal(subject):
  checks.check_causal(subject, TIME)


@subjects_of(typical_forms, often=MAIN)
def test_deterministic(subject):
  checks.check_deterministic(subject, TIME)


@subjects_of(typical_forms, often=MAIN)
def test_edges(subject):
  checks.check_edges(subject, TIME)


@subjects_of(decaying_forms, often=MAIN)
def test_strong_decays(subject):
  checks.check_strong_decays(subject, TIME, "float64")


# One of those whose sums over tiles the others share.
@subjects_of(decaying_forms, often=("state_space_duality",))
def test_strong_decays_in_float32(subject):
  # After a token that forgets everything, a column of Lattice has a direction
  # that does not depend on the size of its entry of the key. The gradient of
  # that entry is rounding divided by it, in the reference as well.
  least_key = 0.05 if subject.memory.name == "lattice" else 0.0
  checks.check_strong_decays(subject, TIME, "float32", least_key=least_key)


@SLOW
@subjects_of(typical_forms)
def test_causality_edges_and_determinism_in_float32(subject):
  checks.check_causal(subject, TIME, x64=False)
  checks.check_edges(subject, TIME, x64=False)
  checks.check_deterministic(subject, TIME, x64=False)


# References share the scan that keeps the rules of packing and states.
@subjects_of(typical_reference, often=("trellis",))
def test_edges_of_the_reference(subject):
  checks.check_edges(subject, TIME)


@SLOW
@subjects_of(other_forms)
def test_edges_of_other_specs(subject):
  checks.check_edges(subject, PACKED.shape[1], PACKED)


@SLOW
@subjects_of(first_forms)
def test_edges_of_one_token(subject):
  checks.check_edges(subject, 1)


@subjects_of(first_forms, often=("trellis", "key_value_means"))
def test_nothing_to_do(subject):
  checks.check_empty(subject)


# The layers' tests say it without compiling.
@subjects_of(first_forms, often=("trellis",))
def test_strict_programs(subject):
  checks.check_strict(subject, PIECE)
