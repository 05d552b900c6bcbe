"""Checks that every memory and implementation must pass; users may import it.

`memories` lists what is checked, `checks` has the checks of the contract, and
`tolerances` has their bounds.
"""

__all__ = [
  "checks",
  "errors",
  "gradients",
  "memories",
  "memory",
  "tolerances",
]
