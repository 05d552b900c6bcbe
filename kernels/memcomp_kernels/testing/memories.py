"""The memories under the contract suite, by name."""

from memcomp_kernels.testing import (
  memory,
  softmax_attention_cases,
  trellis_cases,
)

MEMORIES: dict[str, memory.Memory] = {
  cases.MEMORY.name: cases.MEMORY
  for cases in (trellis_cases, softmax_attention_cases)
}
