"""Random input: every mistake is one line and exit code 2, none a traceback.

The number of draws and their seed:

  MEMCOMP_FUZZ_DRAWS=1000 MEMCOMP_FUZZ_SEED=1 \
    python -m pytest -n 0 -m slow tests/fuzz
"""

import json
import os
import pathlib
import random
import re
import shutil

import chain_model
import draws
import forks
import numpy as np
import odd_tokenizers
import pytest
import runs

from memcomp import cli, config_flag, errors, paths
from memcomp import config as config_lib
from memcomp.data import prepare, sources
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.evaluation import load, text
from memcomp.export import write
from memcomp.inference import prefill, saved, session, stop
from memcomp.layers import trellis
from memcomp.models import decoder

pytestmark = [
  pytest.mark.slow,
  # A read that fails leaves callbacks of tensorstore and orbax behind.
  pytest.mark.filterwarnings("ignore"),
]

DRAWS = int(os.environ.get("MEMCOMP_FUZZ_DRAWS", "100"))
"""Of all tests together."""
SEED = int(os.environ.get("MEMCOMP_FUZZ_SEED", "0"))
HERE = pathlib.Path(__file__).parent
TRAINING = HERE.parent / "training"
CODES = (0, errors.EXIT_BAD_INPUT, errors.EXIT_DIVERGED, cli.EXIT_INTERRUPTED)

CONFIG = """
import sys
sys.path.insert(0, {training!r})
import leaky
import training_cases
from memcomp.models import decoder
def get_config(model=""):
  if model != "real":
    decoder.Decoder = leaky.Decoder  # compiled in a second
  config = training_cases.tiny("text", steps=2)
  config.optimizer.warmup_steps = 1
  config.training.batch_size = 2
  config.evaluation.lengths = config.evaluation.rows = 1
  config.evaluation.sample_tokens = 2
  return config
"""


def generators(name: str, share: float) -> list[random.Random]:
  """Returns a generator for each of a share of the draws."""
  count = max(1, round(share * DRAWS))
  return [random.Random(f"{SEED} {name} {i}") for i in range(count)]


def tiny(source: str) -> config_lib.Config:
  mixer = trellis.TrellisConfig(
    heads=2, key_dim=8, value_dim=8, num_slots=4, chunk_size=8
  )
  return config_lib.Config(
    name="tiny",
    model=decoder.DecoderConfig(
      d_model=16, num_layers=1, mlp_dim=16, mixers={"memory": mixer}
    ),
    data=config_lib.DataConfig(
      source=source, validation=source, sequence_length=16
    ),
  )


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  """A folder with a text, a run, an export, and much that is none."""
  folder = tmp_path_factory.mktemp("fuzz") / "a/b"
  (folder / "text").mkdir(parents=True)
  draws.make_places(folder)
  for number in range(4):
    words = f"to and fro, {number} times; " * 20
    (folder / f"text/{number}.txt").write_text(words)
  (folder / "tiny.py").write_text(CONFIG.format(training=str(TRAINING)))
  odd_tokenizers.save(odd_tokenizers.special(), folder)
  runs.save(folder / "run", tiny(str(folder / "text")), 3)
  write.export(folder / "run", folder / "exported")
  return folder


def tell(problems: list[str], count: int) -> None:
  shown = "\n\n".join(problems[:5])
  assert not problems, f"{len(problems)} of {count} draws:\n{shown}"


# Programs.

BASE = {
  "train": (["--config=tiny.py"], ["--config=tiny.py:real"]),
  "eval": (
    ["--checkpoint=run", "--task=sample", "--tokens=2"],
    ["--checkpoint=exported", "--task=sample", "--tokens=2"],
    ["--checkpoint=run", "--task=perplexity", "--lengths=1", "--rows=1"],
    ["--checkpoint=run", "--task=throughput", "--contexts=8"],
    ["--checkpoint=run", "--task=chat", "--tokens=2"],
    ["--checkpoint=run", "--task=niah", "--contexts=600", "--samples=1"],
    ["--checkpoint=run", "--task=harness", "--tasks=a"],
    ["--checkpoint=run", "--task=mqar"],
    ["--checkpoint=run", "--task=compare"],
    ["--task=capacity", "--dims=8", "--samples=1"],
    [],
  ),
  "export": (["--checkpoint=run", "--out=out"], []),
  "convert": (
    [
      *("--checkpoint=run", "--mixer=lattice", "--workdir=out"),
      *("--distill_steps=1", "--steps=2", "--batch_size=2"),
    ],
    [],
  ),
  "prepare": (["--source=text", "--out=out", "--workers=1"], []),
  "doctor": (["--help"],),
}
MODULES = {
  "train": "memcomp.commands.train",
  "eval": "memcomp.commands.evaluate",
  "export": "memcomp.export.__main__",
  "convert": "memcomp.convert.__main__",
  "prepare": "memcomp.data.prepare",
  "doctor": "memcomp.doctor",
}
SHARES = {
  "train": 0.2,
  "eval": 0.15,
  "export": 0.04,
  "convert": 0.04,
  "prepare": 0.06,
  "doctor": 0.01,
}
_ASIDE = ("config", "distributed", "coordinator", "allow_downloads", "topology")
"""Flags that reach for other machines, or for minutes of work."""


@pytest.mark.parametrize("command", BASE)
def test_random_command_lines(command, place, tmp_path):
  folder = tmp_path / "a/b"
  shutil.copytree(place, folder, symlinks=True)
  module = MODULES[command]
  if command in ("prepare", "doctor"):
    names = ["source", "out", "tokenizer", "shard_tokens", "workers", "verify"]
  else:
    names = sorted(
      set(forks.run(module, folder, [TRAINING], names=True)) - {*_ASIDE}
    )
  fields = config_flag.field_paths(tiny("text"))
  drawn = []
  for rng in generators(command, SHARES[command]):
    line = list(rng.choice(BASE[command]))
    if command == "train":
      line += draws.overrides(rng, fields)
    line += draws.flags(rng, names, 1 if command == "train" else 3)
    drawn.append(line)
  results = forks.run(module, folder, [TRAINING], commands=drawn)
  problems = []
  for line, (code, out, err) in zip(drawn, results, strict=True):
    said = re.search(r"^(error: |prepare: |usage: )", err, re.MULTILINE)
    if (
      code not in CODES
      or "Traceback" in out + err
      or "Exception ignored" in err
      or (code == errors.EXIT_BAD_INPUT and not said)
    ):
      shown = [part[:200] for part in line]
      problems.append(f"{command} {shown}\nexit {code}: {err[-1500:]}")
  tell(problems, len(drawn))


# Content.


def try_out(problems: list[str], about: str, function) -> None:
  """Notes what `function` raises, but for what has words for users."""
  try:
    function()
  except BaseException as error:
    if isinstance(error, KeyboardInterrupt):
      raise
    line = errors.explain(error) if isinstance(error, Exception) else None
    if line is None:
      problems.append(f"{about}\n{type(error).__name__}: {error}"[:1500])


def test_random_sources(tmp_path):
  every, problems = generators("sources", 0.2), []
  names = ("a.txt", "b.md", "c.jsonl", "d.TXT", "e.jsonl.gz", "f.txt.zst")
  names += ("g.bin", "g.bin.json", "h.jsonl.zst", "i.py.gz")
  for number, rng in enumerate(every):
    folder = tmp_path / f"{number}"
    (folder / "sub").mkdir(parents=True)
    for name in rng.sample(names, rng.randint(1, 3)):
      made = draws.packed(rng, name, draws.content(rng))
      (folder / rng.choice(("", "sub")) / name).write_bytes(made)
    if rng.random() < 0.2:
      (folder / "sub/link").symlink_to(rng.choice(("..", ".", "x", "../sub")))
    pattern = rng.choice(("", "/**/*", "/*/*", "/*.*", "/**/*.[tj]*"))
    source = rng.choice((f"{folder}{pattern}", f"{folder},{folder}/sub"))
    about = f"{source}: {[p.name for p in folder.rglob('*')]}"

    def read(source=source):
      tokenizer = tokenizer_lib.load("bytes")
      store = sources.open_source(source, tokenizer)
      for document, length in enumerate(store.lengths):
        store.read(document, 0, int(length))
      assert text.num_bytes(store, tokenizer) == store.num_tokens

    def stored(source=source, out=folder / "out", rng=rng):
      prepare.prepare(source, str(out), shard_tokens=rng.choice((1, 50)))
      read(str(out))
      broken = rng.choice([p for p in out.rglob("*") if p.is_file()])
      broken.write_bytes(draws.damaged(rng, broken.read_bytes()))
      read(str(out))

    try_out(problems, about, read)
    try_out(problems, about, stored)
  tell(problems, len(every))


TEXTS = (
  "hello world, hi",
  "",
  " ",
  "\n",
  "na\u00efve \ufb01ne",
  "a<|endoftext|>",
)


def test_random_tokenizers(tmp_path):
  every, problems = generators("tokenizers", 0.15), []
  for rng in every:
    make, sentence = rng.choice(list(odd_tokenizers.CASES.values()))
    spec = json.loads(make().to_str())
    path = tmp_path / "tokenizer.json"
    for _ in range(rng.randint(0, 2)):
      spec = draws.changed(rng, spec)
    content = json.dumps(spec).encode()
    if rng.random() < 0.2:
      content = draws.damaged(rng, content)
    path.write_bytes(content)

    def use(sentence=sentence, path=str(path)):
      tokenizer = tokenizer_lib.load(path)
      for one in (*TEXTS, sentence):
        ids = tokenizer.encode(one)
        size = len(one.encode()) if len(ids) else 0
        assert tokenizer.bytes_of(ids).sum() == size
        tokenizer.decode(ids)
        decoder_ = stop.Text(tokenizer)
        _ = [decoder_.push(int(token)) for token in ids], decoder_.finish()

    try_out(problems, content[:1000].decode(errors="replace"), use)
  tell(problems, len(every))


@pytest.fixture(scope="module")
def saved_things(place, tmp_path_factory):
  """Folders of each kind: a run, exports, a session, a model of another."""
  folder = tmp_path_factory.mktemp("saved")
  shutil.copytree(place / "run", folder / "run")
  shutil.copytree(place / "exported", folder / "safetensors")
  write.export(place / "run", folder / "orbax", format="orbax")
  chain_model.make(folder / "llama")
  opened = load.open_checkpoint(place / "run")
  owner = saved.Owner(opened.model, opened.config.model, opened.tokenizer)
  read = prefill.read(
    opened.model, session.start(opened.model), [np.arange(5, dtype=np.int32)]
  )
  saved.save(folder / "session", read, owner)
  return folder, owner


KINDS = ("run", "safetensors", "orbax", "llama", "session")


def test_random_checkpoints(saved_things, tmp_path):
  every, problems = generators("checkpoints", 0.15), []
  whole, owner = saved_things
  for number, rng in enumerate(every):
    kind = rng.choice(KINDS)
    folder = tmp_path / f"{number}"
    shutil.copytree(whole / kind, folder)
    if rng.random() < 0.7:  # which would find all that follows
      for path in folder.rglob("sha256.json"):
        path.unlink()
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    path = rng.choice(files)
    if rng.random() < 0.5:
      texts = [
        p for p in files if "meta" in str(p).lower() or p.suffix == ".json"
      ]
      path = rng.choice(texts or files)
    content = path.read_bytes()
    action = rng.random()
    try:
      spec = json.loads(content)
    except errors.BAD_JSON:
      spec = None
    if action < 0.1:
      path.unlink()
    elif action < 0.7 and spec is not None:
      path.write_text(json.dumps(draws.changed(rng, spec)))
    else:
      path.write_bytes(draws.damaged(rng, content))

    def use(kind=kind, folder=folder):
      if kind == "session":
        saved.load(folder, owner)
      else:
        load.open_checkpoint(folder)

    changed = path.read_bytes()[:1000] if path.exists() else b"gone"
    name = path.relative_to(folder)
    try_out(problems, f"{kind}/{name}: {changed!r}", use)
  tell(problems, len(every))


def test_random_paths(place, monkeypatch):
  every, problems = generators("paths", 0.1), []
  monkeypatch.chdir(place)
  monkeypatch.setenv("HOME", str(place))
  bytes_ = tokenizer_lib.load("bytes")
  for rng in every:
    word = rng.choice((*draws.WORDS, "a\0b", *draws.WORDS))
    for use in (
      paths.expand,
      tokenizer_lib.load,
      lambda source: sources.open_source(source, bytes_),
      load.open_checkpoint,
    ):
      if word != "stdlib":  # nine megabytes
        try_out(problems, repr(word), lambda use=use, word=word: use(word))
  tell(problems, len(every))
