"""The packages of the distribution; all else stands in pyproject.toml.

A wheel has configs/ as memcomp/configs. pyproject.toml can place such a package
or find packages, but not both.
"""

from setuptools import find_namespace_packages, setup

setup(
  packages=[
    *find_namespace_packages(".", include=["memcomp*"]),
    *find_namespace_packages("kernels", include=["memcomp_kernels*"]),
    "memcomp.configs",
  ],
  package_dir={
    "memcomp_kernels": "kernels/memcomp_kernels",
    "memcomp.configs": "configs",
  },
)
