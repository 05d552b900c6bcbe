"""The memories that the contract suite checks, by name."""

from memcomp_kernels.testing import (
  delta_rule_cases,
  infini_attention_cases,
  key_value_means_cases,
  lattice_cases,
  linear_attention_cases,
  memory,
  ovq_cases,
  rwkv7_cases,
  slot_attention_cases,
  softmax_attention_cases,
  state_space_duality_cases,
  tensor_cache_cases,
  test_time_training_cases,
  trellis_cases,
  two_pass_delta_cases,
)

MEMORIES: dict[str, memory.Memory] = {
  cases.MEMORY.name: cases.MEMORY
  for cases in (
    trellis_cases,
    delta_rule_cases,
    infini_attention_cases,
    key_value_means_cases,
    lattice_cases,
    linear_attention_cases,
    ovq_cases,
    rwkv7_cases,
    slot_attention_cases,
    softmax_attention_cases,
    state_space_duality_cases,
    tensor_cache_cases,
    test_time_training_cases,
    two_pass_delta_cases,
  )
}
