"""What was written before mixers had names is read as it was meant.

`data/by_letters.tar.xz` holds a run, a session and an export that the last
version without names made of `data/hybrid.py`: see `data/make.py`.
"""

import copy
import dataclasses
import json
import pathlib
import runpy
import shutil
import tarfile

import jax
import numpy as np
import pytest
from absl import flags
from ml_collections import config_flags

from memcomp import config as config_lib
from memcomp import errors
from memcomp.evaluation import load
from memcomp.export import read
from memcomp.inference import saved
from memcomp.layers import (
  lattice,
  linear_attention,
  softmax_attention,
  trellis,
)
from memcomp.models import decoder, legacy_mixers
from memcomp.runs import workdir
from memcomp.training import run as run_lib

DATA = pathlib.Path(__file__).parent / "data"
TRELLIS = trellis.TrellisConfig(num_slots=4)
WINDOW = softmax_attention.SoftmaxAttentionConfig(window_size=8)
LINEAR = linear_attention.LinearAttentionConfig()


@pytest.fixture(scope="module")
def old(tmp_path_factory):
  """The folder with what the old version wrote."""
  folder = tmp_path_factory.mktemp("old")
  with tarfile.open(DATA / "by_letters.tar.xz") as archive:
    archive.extractall(folder, filter="data")
  return folder


@pytest.fixture
def config():
  """What the old config file gives today."""
  return runpy.run_path(str(DATA / "hybrid.py"))["get_config"]()


@pytest.fixture(scope="module")
def opened(old):
  return load.open_checkpoint(old / "run")


@pytest.fixture(scope="module")
def expected(old):
  return json.loads((old / "expected.json").read_text())


def renamed(config):
  """The same model, its mixers under names that say something."""
  found = copy.deepcopy(config)
  names = {"a": "memory", "b": "window", "c": "mean"}
  mixers = {names[letter]: m for letter, m in found.model.mixers.items()}
  found.model.mixers, found.model.pattern = mixers, "window+memory,1*mean"
  return found


def test_a_config_file_and_the_saved_config_are_one(old, config):
  assert list(config.model.mixers) == ["a", "b", "c"]
  assert config.model.layer_names() == ["b", "a", "b", "a", "c"]
  found = workdir.saved_config(old / "run")
  assert config_lib.to_dict(found) == config_lib.to_dict(config)
  assert "mixer" not in config_lib.to_dict(config.model)


def assert_logits(model, expected):
  logits = jax.jit(model.__call__)(np.array(expected["tokens"])[None])
  np.testing.assert_allclose(
    logits[0, -1], expected["last_logits"], rtol=1e-5, atol=1e-5
  )


def test_a_checkpoint_computes_what_it_did(opened, expected):
  assert opened.step == 2
  assert_logits(opened.model, expected)


def test_an_export_computes_what_it_did(old, expected):
  assert_logits(read.load(old / "export").model, expected)


def test_a_session_goes_on(old, opened, config, expected):
  owner = saved.Owner(opened.model, config.model, opened.tokenizer)
  session = saved.load(old / "session", owner)
  assert session.position[0] == len(expected["tokens"])
  np.testing.assert_allclose(
    session.logits[0], expected["last_logits"], rtol=1e-5, atol=1e-5
  )
  named = owner._replace(config=renamed(config).model)
  saved.load(old / "session", named)
  named.config.mixers["window"].window_size = 7
  with pytest.raises(
    errors.UserError, match=r"model\.mixers\.window\.window_size was 6, is 7\)"
  ):
    saved.load(old / "session", named)


@pytest.mark.parametrize("rename", [copy.deepcopy, renamed])
def test_a_run_goes_on(old, config, rename, tmp_path, capfd):
  """Its config, its checkpoint's and its arrays, optimizer and carry too."""
  folder = shutil.copytree(old / "run", tmp_path / "run")
  config = rename(config)
  other = copy.deepcopy(config)
  first = next(iter(other.model.mixers))
  other.model.mixers[first].num_slots = 3
  with pytest.raises(
    errors.UserError, match=rf"model\.mixers\.{first}\.num_slots was 2, is 3"
  ):
    run_lib.run(other, folder)
  assert run_lib.run(config, folder) == 0
  assert "all 2 steps are done" in capfd.readouterr().out
  assert workdir.saved_config(folder) == config


def test_another_order_of_layers_is_another_model(old, config):
  before = json.loads((old / "run/config.json").read_text())
  for pattern in ("memory+window,1*mean", "2*(window+memory),mean*2"):
    other = renamed(config)
    other.model.pattern = pattern
    other.model.num_layers += "*2" in pattern
    with pytest.raises(errors.UserError, match=r"model\.pattern was 'ba,1\*c'"):
      workdir.check_same(before, other, "here")


@pytest.mark.filterwarnings("ignore:the load_module")  # of ml_collections
def test_flags_of_before_reach_the_mixers():
  argv = [
    "train.py",
    f"--config={DATA / 'hybrid.py'}",
    "--config.model.mixer.num_slots=3",
    "--config.model.mixer_b.window_size=7",
    "--config.model.mixer_c.decay=head",
    "--config.model.mixers.b.rotary_dim=0",
    "--noconfig.model.mixer.forget_gate",
    "--config.model.pattern=aab,1*a,1*c",
  ]
  values = flags.FlagValues()
  config_flags.DEFINE_config_file(
    "config", flag_values=values, lock_config=True, sys_argv=argv
  )
  values(argv)
  model = values.config.model
  a, b, c = model.mixers.values()
  assert (a.num_slots, a.forget_gate) == (3, False)
  assert (b.window_size, b.rotary_dim) == (7, 0)
  assert c.decay == "head"
  assert model.layer_names() == ["a", "a", "b", "a", "c"]


@pytest.mark.parametrize(
  ("fields", "mixers", "layers"),
  [
    ({}, {"memory": trellis.TrellisConfig()}, ["memory"] * 4),
    ({"pattern": "a"}, {"memory": trellis.TrellisConfig()}, ["memory"] * 4),
    ({"mixer": LINEAR}, {"a": LINEAR}, ["a"] * 4),
    (
      {"mixer": TRELLIS, "mixer_b": None, "mixer_c": LINEAR, "pattern": "acac"},
      {"a": TRELLIS, "c": LINEAR},
      ["a", "c"] * 2,
    ),
    (
      {"mixer_b": WINDOW, "pattern": "1*b,a"},
      {"a": trellis.TrellisConfig(), "b": WINDOW},
      ["b", "a", "a", "a"],
    ),
  ],
)
def test_the_old_arguments(fields, mixers, layers):
  model = decoder.DecoderConfig(num_layers=4, **fields)
  assert model.mixers == mixers
  assert model.layer_names() == layers


def test_the_old_attributes_are_those_in_order():
  model = decoder.DecoderConfig(
    mixers={"memory": TRELLIS, "window": WINDOW}, pattern="aab"
  )
  assert (model.mixer, model.mixer_b, model.mixer_c) == (TRELLIS, WINDOW, None)
  assert model.layer_names()[:3] == ["memory", "memory", "window"]
  model.mixer, model.mixer_c = LINEAR, TRELLIS
  assert model.mixers == {"memory": LINEAR, "window": WINDOW, "c": TRELLIS}
  model.mixer_b = None
  assert list(model.mixers) == ["memory", "c"]
  # As config files changed the default.
  model = decoder.DecoderConfig()
  model.mixer_b, model.pattern = WINDOW, "ab"
  assert list(model.mixers.values()) == [trellis.TrellisConfig(), WINDOW]
  assert model.layer_names()[:3] == ["memory", "b", "memory"]


def test_a_replaced_config_is_its_own():
  model = decoder.DecoderConfig(mixers={"memory": TRELLIS})
  wide = dataclasses.replace(model, d_model=32, mixer=LINEAR)
  assert (wide.mixers, wide.d_model) == ({"memory": LINEAR}, 32)
  assert model.mixers == {"memory": TRELLIS}
  same = dataclasses.replace(model, d_model=32)
  same.mixers["memory"] = WINDOW
  assert model.mixers == {"memory": TRELLIS}


def test_names_are_taken_over_where_models_are_one():
  def model(pattern, **mixers):
    return decoder.DecoderConfig(num_layers=6, mixers=mixers, pattern=pattern)

  new = model("window+memory", memory=TRELLIS, window=WINDOW)
  for pattern in ("ba", "b+a", "(ba)*3"):
    found = legacy_mixers.rename_like(model(pattern, a=TRELLIS, b=WINDOW), new)
    assert found == new
  # What stands in no layer keeps its name.
  found = legacy_mixers.rename_like(
    model("ba", a=TRELLIS, b=WINDOW, c=LINEAR), new
  )
  assert found.mixers == new.mixers | {"c": LINEAR}
  for pattern in ("ab", "3*b,3*a", "2*(bab)", "2*(bba)"):
    other = model(pattern, a=TRELLIS, b=WINDOW)
    assert legacy_mixers.rename_like(other, new) == other


def test_sizes_of_the_rule_may_be_given():
  """As runs of versions with another default have them."""

  def model(**sizes):
    memory = lattice.LatticeConfig(**sizes)
    return decoder.DecoderConfig(d_model=128, mixers={"memory": memory})

  given = {"heads": 2, "value_dim": 64, "num_slots": 64}
  for before in (given, {"num_slots": 64}):
    for now in ({}, {"heads": 2}):
      old = config_lib.to_dict(model(**before))
      assert workdir.changes(old, model(**now), prefix="model") == []
  (line,) = workdir.changes(
    config_lib.to_dict(model(num_slots=32)), model(), prefix="model"
  )
  assert line == "model.mixers.memory.num_slots was 32, is 64"
