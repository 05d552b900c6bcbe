"""What prepare is tested on."""

import gzip
import json
import os

import numpy as np
import pytest


@pytest.fixture
def no_fsync(monkeypatch):
  """Most of the time goes there; sub-processes still wait for the disk."""
  monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def corpus(tmp_path):
  """Files of many sizes, a long .jsonl, something compressed, empty ones."""
  folder = tmp_path / "corpus"
  folder.mkdir()
  random = np.random.default_rng(0)
  for i in range(12):
    size = int(random.integers(1, 9000))
    content = random.integers(97, 123, size, np.uint8).tobytes()
    (folder / f"{i}.txt").write_bytes(content)
  (folder / "none.txt").write_bytes(b"")
  lines = [json.dumps({"text": f"line {i} é " * (i % 50)}) for i in range(600)]
  (folder / "long.jsonl").write_text("\n\n".join(lines), encoding="utf-8")
  (folder / "z.txt.gz").write_bytes(gzip.compress(b"zipped " * 999))
  return str(folder)
