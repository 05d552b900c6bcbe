"""A folder in place of a bucket service, for tests of gs:// paths."""

import os
import pathlib

import pytest
from array_record.python import array_record_module
from etils.epath import backend
from fsspec.implementations import local
from orbax.checkpoint._src.path import gcs_utils


def make(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """Lets gs://NAME/... be `folder`/NAME/...; what buckets lack raises.

  What C++ reads (arrays by TensorStore, records by array_record) it reads from
  the folder.
  """

  class Service(local.LocalFileSystem):
    cachable = False

    @classmethod
    def _strip_protocol(cls, path):
      path = os.fspath(path).replace("gs://", f"{folder}/", 1)
      return super()._strip_protocol(path)

    def glob(self, path, **options):
      return [os.path.relpath(p, folder) for p in super().glob(path, **options)]

    def mv(self, *args, **options):
      raise AssertionError("a bucket cannot rename")

    rename = mv

  service = Service(auto_mkdir=True)
  fsspec = type(backend.fsspec_backend)
  monkeypatch.setattr(fsspec, "_get_filesystem", lambda self, name: service)
  monkeypatch.setattr(
    gcs_utils,
    "get_kvstore_for_gcs",
    lambda path: {"driver": "file", "path": path.replace("gs:/", str(folder))},
  )
  monkeypatch.setattr(
    gcs_utils, "is_hierarchical_namespace_enabled", lambda path: False
  )
  reader = array_record_module.ArrayRecordReader
  monkeypatch.setattr(
    array_record_module,
    "ArrayRecordReader",
    lambda path, **options: reader(service._strip_protocol(path), **options),
  )
  monkeypatch.setattr("memcomp.paths._LIBRARIES", ("fsspec",))
