"""Checks that every memory and implementation must pass; users may import it.

`memories` lists what is checked, `checks` holds the contract, `tolerances` its
bounds.
"""

__all__ = [
  "checks",
  "errors",
  "fences",
  "gradients",
  "hopper",
  "memories",
  "memory",
  "meshes",
  "tolerances",
]
