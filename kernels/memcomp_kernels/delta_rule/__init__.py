"""The delta rule: DeltaNet (arXiv 2406.06484), Gated DeltaNet (2412.06464)."""

from memcomp_kernels.delta_rule.api import delta_rule, gated_delta_rule

__all__ = ["delta_rule", "gated_delta_rule"]
