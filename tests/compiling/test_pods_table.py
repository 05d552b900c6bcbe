"""The table of compiled steps: its meshes, its rows, its going on."""

import json
import pathlib
import shutil
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

from memcomp import config as config_lib

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import pods as table


@pytest.mark.parametrize(
  ("devices", "rows", "d_model", "mesh"),
  [
    (256, 256, 768, (16, 16, 1)),  # 48 features a shard; 32 would leave 24
    (256, 256, 2048, (8, 32, 1)),  # 64 features a shard
    (256, 64, 768, (4, 16, 4)),  # more devices than rows: time
    (256, 16, 768, (1, 16, 16)),
    (16, 256, 768, (1, 16, 1)),
    (4, 3, 768, (1, 1, 4)),
  ],
)
def test_meshes(devices, rows, d_model, mesh):
  found = table.mesh_of(devices, rows, d_model)
  assert tuple(found[a] for a in ("replica", "fsdp", "context")) == mesh


def test_a_command_names_fields_that_exist():
  line = table.command("trellis-125m", "v5e:16x16", 8192, 256, "w")
  settings = dict(
    x[len("--config.") :].split("=")
    for x in line
    if ".py" not in x and x.startswith("--config.")
  )
  assert settings["training.batch_size"] == "64"
  assert settings["mesh.context"] == "4"
  for path in settings:
    place = config_lib.Config(name="x")
    for field in path.split("."):
      place = place[field] if isinstance(place, dict) else getattr(place, field)


@pytest.mark.parametrize(
  ("stderr", "said"),
  [
    (
      "warning: x\nerror: a device needs 17GiB\nlower it\n",
      "error: a device needs 17GiB",
    ),
    (
      "  File x\njax.errors.JaxRuntimeError: RESOURCE: vmem\nmore",
      "jax.errors.JaxRuntimeError: RESOURCE: vmem",
    ),
    ("Killed\n", "Killed"),
    ("", "no message"),
  ],
)
def test_reasons(stderr, said):
  assert table.reason(stderr) == said


ROW = {
  "mesh": {"replica": 2, "fsdp": 4, "tensor": 1, "context": 1},
  "memory_per_device": {
    "arguments": 2**20,
    "temporaries": 3 * 2**20,
    "total": 4 * 2**20,
    "available": 40 * 2**20,
  },
  "flops": {"ratio": 1.333},
  "kernels": {"forward": 12, "backward": 24},
  "collectives": {
    "all-gather": {"executions": 3, "bytes": 2**21, "in_inner_loops": 0},
    "all-to-all": {"executions": 1, "bytes": 2**20, "in_inner_loops": 5},
  },
  "seconds": {"compile": 61.2},
}


def test_the_table_goes_on_and_guesses_nothing(monkeypatch, tmp_path):
  compiled = []

  def one(name, topology, length, seconds):
    del seconds
    compiled.append((name, topology, length))
    row = {"name": name, "topology": topology, "length": length}
    return row | (ROW if name != "b" else {"reason": "error: x | y. z"})

  monkeypatch.setattr(table, "one", one)
  path = tmp_path / "pods.json"

  def run(names, **more):
    with flagsaver.flagsaver(
      names=names,
      topologies=["v5e:2x2"],
      row_lengths=["2048"],
      results=str(path),
      **more,
    ):
      assert table.main() == 0
    return path.with_suffix(".md").read_text()

  def section(text, title):
    _, found = text.split(f"## {title}\n")
    return [
      line
      for line in found.split("\n## ")[0].splitlines()
      if line.startswith(("|", "-"))
    ]

  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  assert "**1 of 1 training steps fit into their chips.**\n" in run(["a"])
  text = run(["a", "b", "c"])
  assert compiled == [(name, "v5e:2x2", 2048) for name in "abc"]
  assert [row["name"] for row in json.loads(path.read_text())] == [*"abc"]
  assert (
    "**2 of 3 training steps fit into their chips.** Too large: b on v5e:2x2,"
    " 2,048 tokens a row.\n"
  ) in text
  assert section(text, "Memory")[2:] == [
    "| 2,048 | a | 0.00 (10.0%) |",
    "| 2,048 | b | none |",
    "| 2,048 | c | 0.00 (10.0%) |",
  ]
  assert section(text, "Work")[2] == "| 2,048 | a | 1.33 |"
  assert section(text, "Traffic")[2] == "| 2,048 | a | 3 |"
  assert section(text, "Meshes")[2:] == [
    "| 2,048 | a, c | replica 2, fsdp 4 |",
    "| 2,048 | b | none |",
  ]
  failed = ["- b on v5e:2x2, 2,048 tokens a row: x / y"]
  assert section(text, "No program") == failed
  assert "Not compiled yet" not in text
  text = run(["d"], only_text=True)
  assert len(compiled) == 3
  assert section(text, "Not compiled yet") == [
    "- d on v5e:2x2, 2,048 tokens a row"
  ]
  assert section(text, "Memory")[2:4] == [
    "| 2,048 | d |  |",
    "| 2,048 | a | 0.00 (10.0%) |",
  ]


def test_a_step_that_needs_more_than_a_device_has_does_not_fit():
  large = ROW["memory_per_device"] | {"total": 41 * 2**20}
  key = ("a", "v5e:2x2", 2048)
  row = dict(zip(("name", "topology", "length"), key, strict=True))
  row |= ROW | {"memory_per_device": large}
  text = table.text([row], [key])
  assert "**0 of 1 training steps fit" in text
  assert "| 2,048 | a | 0.04 (102.5%) |" in text


def test_the_page_is_that_of_its_results(tmp_path):
  folder = pathlib.Path(__file__).parents[2] / "docs" / "results"
  shutil.copy(folder / "pods.json", tmp_path)
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  results = str(tmp_path / "pods.json")
  with flagsaver.flagsaver(results=results, only_text=True):
    assert table.main() == 0
  page, expected = (
    (path / "pods.md").read_text(encoding="utf-8")
    for path in (folder, tmp_path)
  )
  assert page == expected, (
    "docs/results/pods.md is old: python benchmarks/pods.py --only_text"
  )
