"""Random command lines, configs and files, each from a generator of its own."""

import gzip
import json
import pathlib
import random
from typing import Any

WORDS = (
  *("", " ", "x", "-", "--", ",", ";", ":", "1:2:3", "64:4:2", "a=b", "%s"),
  *("true", "None", "nan", "inf", "-inf", "1e9", "1e999", "0.5", "-1", "0"),
  *("1", "2", "3", "16", "2147483648", "4294967296", "9" * 30, "9" * 5000),
  *("~", "~/x", "~nobody-of-it/x", "/proc/x", "/dev/null", "file", "file/x"),
  *("dangling", "loop/x", "..", ".", "text", "text/0.txt", "text/**/*.txt"),
  *("*", "**", "[", "a" * 300, "a/" * 300, "é", "\udcff", "日本", "$a$", "{}"),
  *("run", "run/checkpoints", "run/checkpoints/3", "exported", "tiny.py"),
  *("tokenizer.json", "empty.txt", "bytes", "none", "stdlib", "0.5:text"),
)
"""What a flag or a field may be given; places are those of `make_places`."""

WHOLE = (-1, 0, 1, 2, 3, 5, 8, 64, 2**31, 2**32, 10**12, 10**30)
"""None that is allowed and would take for ever."""

NUMBERS = (*WHOLE, 0.5, -0.5, 1e-30, 1e30, 1e300, "nan", "inf", "1e999")


def make_places(folder: pathlib.Path) -> None:
  """Makes files that `WORDS` names."""
  (folder / "file").touch()
  (folder / "empty.txt").touch()
  (folder / "dangling").symlink_to("nowhere")
  (folder / "loop").symlink_to("loop")


def overrides(rng: random.Random, fields: dict[str, Any]) -> list[str]:
  """Draws up to three --config.FIELD=VALUE."""
  drawn = []
  for path in rng.sample(sorted(fields), rng.choice((0, 1, 1, 2, 3))):
    kinds = {bool: ("true", "false", "x"), int: WHOLE, float: NUMBERS}
    values = kinds.get(type(fields[path]), WORDS)
    if rng.random() < 0.1:
      values = WORDS
    drawn.append(f"--config.{path}={rng.choice(values)}")
  if rng.random() < 0.05:
    drawn.append(f"--config.{rng.choice(WORDS)}={rng.choice(WORDS)}")
  return drawn


def flags(rng: random.Random, names: list[str], most: int = 3) -> list[str]:
  """Draws up to `most` flags of some names, now and then one of none."""
  drawn = []
  for _ in range(rng.randint(0, most)):
    name, value = rng.choice(names), rng.choice((*WORDS, *NUMBERS))
    form = rng.random()
    if form < 0.85:
      drawn.append(f"--{name}={value}")
    elif form < 0.95:
      drawn += [f"--{name}", str(value)]
    else:
      drawn.append(f"--{rng.choice(WORDS)}")
  return drawn


def content(rng: random.Random) -> bytes:
  """Draws what a text file may hold, or not."""
  kind = rng.randrange(7)
  if kind == 0:
    return rng.randbytes(rng.choice((0, 1, 7, 300)))
  if kind == 1:
    return "".join(
      rng.choices("ab é日\u2028\r\n\t\0", k=rng.randrange(99))
    ).encode()
  if kind == 2:
    return rng.choice(WORDS).encode(errors="surrogateescape")
  lines = [json.dumps(value(rng)).encode() for _ in range(rng.randrange(5))]
  texts = [json.dumps({"text": rng.choice(WORDS)}).encode() for _ in "ab"]
  if kind == 3:
    return b"\n".join(texts)
  if kind == 4:
    return b'{"text": "a", "n": ' + b"1" * rng.choice((9, 5000)) + b"}"
  return rng.choice((b"\n", b"\r\n", b"")).join([*lines, *texts])


def packed(rng: random.Random, name: str, plain: bytes) -> bytes:
  """Compresses by the name's extension, now and then cut short or changed."""
  made = plain
  if name.endswith(".gz"):
    made = gzip.compress(plain)
  elif name.endswith(".zst"):
    import zstandard

    log = rng.choice((10, 20, 27, 28, 31))
    parameters = zstandard.ZstdCompressionParameters(window_log=log)
    made = zstandard.ZstdCompressor(compression_params=parameters).compress(
      plain
    )
  return damaged(rng, made) if rng.random() < 0.3 else made


def damaged(rng: random.Random, before: bytes) -> bytes:
  """Cuts, flips, doubles or replaces bytes."""
  place = rng.randrange(len(before) + 1)
  return rng.choice(
    (
      before[:place],
      before[place:],
      before[:place] + rng.randbytes(3) + before[place + 3 :],
      before + before,
      b"",
    )
  )


def value(rng: random.Random, depth: int = 0) -> Any:
  """Draws a value as JSON has them."""
  kind = rng.randrange(8 if depth < 2 else 6)
  if kind == 6:
    return [value(rng, depth + 1) for _ in range(rng.randrange(3))]
  if kind == 7:
    names = rng.sample(("text", "name", "x", "type", "id"), rng.randrange(3))
    return {name: value(rng, depth + 1) for name in names}
  drawn = (None, True, rng.choice(WORDS), rng.choice(WHOLE), 0.5, "a text")
  return drawn[kind]


def changed(rng: random.Random, before: Any) -> Any:
  """Replaces, takes out or adds a value somewhere in what JSON holds."""
  if not isinstance(before, dict | list) or not before or rng.random() < 0.15:
    return value(rng)
  keys = list(before) if isinstance(before, dict) else range(len(before))
  key = rng.choice(list(keys))
  after = before.copy()
  action = rng.random()
  if action < 0.1:
    del after[key]
  elif action < 0.15 and isinstance(after, dict):
    after[rng.choice(WORDS)] = value(rng)
  else:
    after[key] = changed(rng, before[key])
  return after
