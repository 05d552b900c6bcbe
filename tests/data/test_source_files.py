"""Files of tokens, compressed ones, and what is said of bad ones."""

import builtins
import gzip
import io
import json

import numpy as np
import pytest
import zstandard
from source_cases import config, jsonl, open_all, texts

from memcomp import errors
from memcomp.data import sources, text


def write_bin(path, values, *, dtype="<u2"):
  np.array(values, dtype).tofile(path)
  return path


def test_token_file(tmp_path):
  path = write_bin(tmp_path / "a.bin", list(b"hello"))
  assert texts(open_all(path)) == ["hello"]
  path = write_bin(tmp_path / "b.bin", list(b"hiyou"), dtype="<u4")
  sidecar = {"dtype": "uint32", "vocab_size": 256, "offsets": [0, 2, 2, 5]}
  (tmp_path / "b.bin.json").write_text(json.dumps(sidecar))
  assert texts(open_all(path)) == ["hi", "you"]
  both = open_all(f"{tmp_path}/a.bin,{path}")
  assert texts(both) == ["hello", "hi", "you"]


def test_split_of_a_token_file(tmp_path):
  values = [i for i in range(100) for _ in range(2)]
  path = write_bin(tmp_path / "a.bin", values)
  sidecar = {"offsets": list(range(0, 201, 2))}
  (tmp_path / "a.bin.json").write_text(json.dumps(sidecar))
  c = config(path, validation_share=0.3)
  train, validation = (
    [store.read(i, 0, 2).tolist() for i in range(len(store.lengths))]
    for store in (sources.open_split(c, s) for s in sources.SPLITS)
  )
  assert sorted(train + validation) == [[i, i] for i in range(100)]
  assert 15 < len(validation) < 45


def write(path, content):
  path.parent.mkdir(exist_ok=True)
  path.write_bytes(content)
  return path


TRUNCATED_GZ = gzip.compress(bytes(range(256)) * 40)[:-20]
TRUNCATED_ZST = zstandard.compress(bytes(range(256)) * 40)[:-3]
LINE = rb'{"text": "a"}' + b"\n"
BIG = b'{"text": "a", "n": ' + b"1" * 5000 + b"}\n"

BAD_FILES = [
  ("a.txt", b"", "empty"),
  ("a.txt", b"one\ntwo\n\xffthree", r"a\.txt:3: not UTF-8 \(byte 0xff\)"),
  ("a.py", b"\xc3", r"a\.py:1: not UTF-8"),
  ("a.jsonl", LINE + b"\n{oops}\n", r"a\.jsonl:3: invalid JSON"),
  ("a.jsonl", LINE + b'{"txt": "a"}', r'a\.jsonl:2: no field "text"'),
  ("a.jsonl", b'{"text": 3}', r'a\.jsonl:1: no field "text"'),
  ("a.jsonl", LINE + BIG, r"a\.jsonl:2: invalid JSON"),
  ("a.jsonl", b'{"text": ' + b"[" * 100_000, r"a\.jsonl:1: invalid JSON"),
  ("a.jsonl", b"[1]", r'a\.jsonl:1: no field "text"'),
  ("a.jsonl", b'{"text": "\xff"}', r"a\.jsonl:1: not UTF-8"),
  ("a.jsonl", b'{"text": "\\ud800"}', r"a\.jsonl:1: .*surrogate"),
  ("a.jsonl", b"\n\n", "no text in it"),
  ("a.png", b"x", "unknown extension"),
  ("a.txt.gz", TRUNCATED_GZ, r"a\.txt\.gz: truncated or corrupt"),
  ("a.txt.gz", b"not gzip", r"a\.txt\.gz: truncated or corrupt"),
  ("a.txt.zst", TRUNCATED_ZST, r"a\.txt\.zst: truncated or corrupt"),
  ("a.txt.zst", b"not zstd", r"a\.txt\.zst: truncated or corrupt"),
  ("a.jsonl.gz", gzip.compress(LINE * 9000)[:-30], "truncated or corrupt"),
  ("a.bin", b"abc", "3 bytes are no multiple of the 2 of uint16"),
  ("a.bin", b"", "empty"),
  ("a.bin", np.array([1, 256, 9], "<u2").tobytes(), "token 1 is 256, outside"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES)
def test_bad_files(name, content, message, tmp_path):
  path = write(tmp_path / name, content)
  with pytest.raises(errors.UserError, match=message) as caught:
    open_all(path)
  assert "\n" not in str(caught.value)
  assert str(path) in str(caught.value)


@pytest.mark.parametrize(
  ("sidecar", "message"),
  [
    ("{", "invalid JSON"),
    ("[]", "must be an object"),
    ('{"dtype": "int8"}', "uint16 or uint32"),
    ('{"dtype": []}', "uint16 or uint32"),
    ('{"offsets": []}', "offsets must rise from 0"),
    ('{"vocab_size": "x"}', "vocab_size"),
    ('{"vocab_size": true}', "must be a whole number"),
    ('{"vocab_size": 5}', "outside the vocabulary of 5"),
    ('{"offsets": [0, 3]}', "offsets must rise from 0"),
    ('{"offsets": [1, 4]}', "offsets must rise from 0"),
    ('{"offsets": [0, 3, 2, 4]}', "offsets must rise from 0"),
    ('{"offsets": "x"}', "offsets must rise from 0"),
    ('{"offsets": [[0], [4, 5]]}', "offsets must rise from 0"),
    ('{"dtype": "uint32"}', "outside the vocabulary"),
    (BIG.decode(), "invalid JSON"),
    ("[" * 100_000, "invalid JSON"),
  ],
)
def test_bad_sidecars(sidecar, message, tmp_path):
  path = write_bin(tmp_path / "a.bin", list(b"abcd"))
  (tmp_path / "a.bin.json").write_text(sidecar)
  with pytest.raises(errors.UserError, match=message) as caught:
    open_all(path)
  assert "\n" not in str(caught.value)


def test_a_token_file_needs_a_tokenizer(tmp_path):
  path = write_bin(tmp_path / "a.bin", list(b"abcd"))
  (tmp_path / "a.bin.json").write_text('{"vocab_size": 256}')
  with pytest.raises(errors.UserError, match="tokenizer=none has no vocab"):
    sources.open_split(config(path, tokenizer="none"), "train")


def test_bad_token_found_while_reading(tmp_path):
  values = np.ones(3 << 20, "<u2")
  values[3 << 19] = 300  # in the middle, which opening does not look at
  store = open_all(write_bin(tmp_path / "a.bin", values))
  with pytest.raises(errors.UserError, match=f"token {3 << 19} is 300"):
    store.read(0, (3 << 19) - 5, (3 << 19) + 5)


@pytest.mark.parametrize("name", ["a.txt", "a.bin", "a.txt.gz"])
def test_unreadable(name, tmp_path, monkeypatch):
  path = write(tmp_path / name, b"some")
  real = builtins.open

  def refuse(file, *args, **kwargs):
    if str(file) == str(path):
      raise PermissionError(13, "Permission denied", str(file))
    return real(file, *args, **kwargs)

  monkeypatch.setattr(builtins, "open", refuse)
  with pytest.raises(
    errors.UserError, match=r"cannot read \(Permission denied\)"
  ):
    open_all(path)


def test_missing_zstandard(tmp_path, monkeypatch):
  path = write(tmp_path / "a.txt.zst", zstandard.compress(b"abc"))
  real = builtins.__import__

  def fake(name, *args, **kwargs):
    if name == "zstandard":
      raise ImportError(name)
    return real(name, *args, **kwargs)

  monkeypatch.setattr(builtins, "__import__", fake)
  with pytest.raises(errors.UserError, match=r"pip install 'memcomp\[text\]'"):
    open_all(path)


@pytest.mark.parametrize("level", [1, 19])
def test_zstd_in_small_reads(level, tmp_path):
  content = (
    np.random.default_rng(0).integers(0, 99, 400_000, np.uint8).tobytes()
  )
  path = write(tmp_path / "a.txt.zst", zstandard.compress(content, level))
  with text.open_binary(str(path)) as stream:
    parts = iter(lambda: stream.read(777), b"")
    assert b"".join(parts) == content
  assert isinstance(stream, io.BufferedReader)


@pytest.mark.parametrize("log", [27, 28, 31])
def test_zstd_with_long_windows(log, tmp_path):
  parameters = zstandard.ZstdCompressionParameters(window_log=log)
  made = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
  content = made.compress(jsonl("sound")) + made.flush()
  path = write(tmp_path / "a.jsonl.zst", content)
  assert texts(open_all(path)) == ["sound"]
  # What only skips is no text, and no damage.
  skipped = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
  path.write_bytes(skipped + content + skipped)
  assert texts(open_all(path)) == ["sound"]
