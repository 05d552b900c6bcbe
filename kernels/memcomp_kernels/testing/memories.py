"""The memories under the contract suite, by name."""

from memcomp_kernels.testing import (
  key_value_means_cases,
  lattice_cases,
  memory,
  softmax_attention_cases,
  tensor_cache_cases,
  test_time_training_cases,
  trellis_cases,
)

MEMORIES: dict[str, memory.Memory] = {
  cases.MEMORY.name: cases.MEMORY
  for cases in (
    trellis_cases,
    key_value_means_cases,
    lattice_cases,
    softmax_attention_cases,
    tensor_cache_cases,
    test_time_training_cases,
  )
}
