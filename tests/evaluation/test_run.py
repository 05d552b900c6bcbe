import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import evaluation_cases as cases
import numpy as np
import pytest

from memcomp import errors
from memcomp.data import sources
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.evaluation import byte_models, load, perplexity, run, tasks, text
from memcomp.inference import generate, sample
from memcomp.layers import slot_attention, softmax_attention
from memcomp.models import abstract

ROOT = pathlib.Path(__file__).parents[2]
BYTES = tokenizer_lib.ByteTokenizer()


def test_perplexity(call, run_folder):
  code, out, err = call(f"--checkpoint={run_folder}", "--task=perplexity")
  assert (code, err) == (0, "")
  result = json.loads((run_folder / "eval/perplexity.json").read_text())
  assert cases.is_figure(run_folder / "eval/perplexity.png")

  assert result["step"] == 3
  assert result["seed"] == result["config"]["seed"] == 7
  assert result["state_bytes"] == 4 * 2 * 2 * 8 * (8 + 8)
  assert result["versions"].keys() >= {"python", "jax", "flax", "numpy"}
  assert result["tokenizer"]["fingerprint"] == BYTES.fingerprint
  found = result["perplexity"]
  assert len(found["task_hash"]) == 16

  opened = load.open_checkpoint(run_folder)
  store = sources.open_split(opened.config.data, "validation")
  assert found["text"]["fingerprint"] == store.fingerprint
  assert found["text"]["bytes"] == store.num_tokens
  score = perplexity.make_score(opened.model)
  whole = perplexity.whole_text(score, text.Stream(store), BYTES, 32)
  assert found["trained_length"] == whole
  assert found["streamed"]["positions"] == 128
  assert [b["last"] for b in found["streamed"]["buckets"]] == [31, 63, 127]

  assert f"{whole['bits_per_byte']:.3f} bits per byte" in out
  number = r"\d\.\d{3}"
  columns = rf"{number} +{number} +[+-]{number} \+- {number}\n"
  assert re.search(rf"64-127 +{columns}", out)
  assert "perplexity.json\n" in out and "perplexity.png\n" in out


@pytest.mark.slow
def test_other_text_and_settings(call, run_folder, tmp_path):
  other = tmp_path / "other.txt"
  other.write_text("other text\n" * 50)
  arguments = (f"--checkpoint={run_folder}", "--task=perplexity")
  code, out, _ = call(
    *arguments, f"--source={other}", "--lengths=2", "--rows=1"
  )
  assert code == 0
  (path,) = (run_folder / "eval").glob("*.json")
  assert re.fullmatch(r"perplexity-[0-9a-f]{8}.json", path.name)
  assert cases.is_figure(path.with_suffix(".png"))
  found = json.loads(path.read_text())["perplexity"]
  assert found["text"]["bytes"] == 550
  assert found["streamed"]["positions"] == 64
  assert found["streamed"]["buckets"][0]["std_over_rows"] is None
  assert "+-" not in out

  code, _, _ = call(*arguments, f"--out={tmp_path / 'a/b'}")
  assert code == 0
  assert cases.is_figure(tmp_path / "a/b/perplexity.png")
  assert not (run_folder / "eval/perplexity.json").exists()

  # Nor does a step that was asked for replace the result of the newest.
  made = run_folder / "eval/perplexity-step3.json"
  step = run_folder / "checkpoints/3"
  for given in (
    (*arguments, "--step=3"),
    (f"--checkpoint={step}", "--task=perplexity"),
  ):
    code, _, _ = call(*given, "--lengths=1", "--rows=1")
    assert code == 0
    assert cases.is_figure(made.with_suffix(".png"))
    made.unlink()
  assert not (run_folder / "eval/perplexity.json").exists()


@pytest.mark.slow
def test_rotary_positions_beyond_the_trained_length(call, trained, tmp_path):
  config = load.open_checkpoint(trained).config
  mixer = {"heads": 2, "key_dim": 8, "value_dim": 8, "rotary_dim": 8}
  config.model.mixers["memory"] = softmax_attention.SoftmaxAttentionConfig(
    **mixer
  )
  config.model.embedding_convolution = 0
  folder = tmp_path / "attention"
  cases.save(folder, config, 3)
  given = (f"--checkpoint={folder}", "--task=perplexity", "--rows=1")
  code, out, err = call(*given, "--lengths=2", "--rotary_scale=4")
  assert (code, err) == (0, "")
  assert "rotary positions stretched by 4 (NTK)" in out
  (path,) = (folder / "eval").glob("*.json")
  assert path.name == "perplexity-rotary4.json"
  # Needles of the model as it is, and of the stretched one, side by side.
  needles = "--task=niah", "--needles=single_1", "--contexts=950", "--samples=1"
  for stretched, before in (
    ([], False),
    (["--rotary_scale=4"], False),
    (["--rotary_scale=4.0000001"], False),
    ([], True),
  ):
    code, out, err = call(given[0], *needles, *stretched)
    assert (code, err) == (0, "")
    assert ("done before" in out) == before
  for name in ("rotary4", "rotary4.0000001"):
    assert (folder / "eval" / name / "niah-step3.json").exists()
  result = json.loads(path.read_text())
  assert result["rotary_scale"] == 4
  assert result["config"]["model"]["mixers"]["memory"]["rotary_scale"] == 4

  # As a model that was made so, and not as the run's own.
  opened = load.open_checkpoint(folder)
  stretched = dataclasses.replace(
    opened.config.model,
    mixers={
      "memory": dataclasses.replace(
        opened.config.model.mixers["memory"], rotary_scale=4.0
      )
    },
  )
  graphdef = abstract.model_of(stretched).graphdef
  model = abstract.merge(graphdef, cases.tiny_params(config))
  stream = text.Stream(sources.open_split(config.data, "validation"))
  found = result["perplexity"]["trained_length"]["nats"]
  whole, own = (
    perplexity.whole_text(perplexity.make_score(m), stream, BYTES, 32)["nats"]
    for m in (model, opened.model)
  )
  assert found == whole
  assert abs(found - own) > 1e-4 * own


@pytest.mark.parametrize(
  ("scale", "text"),
  [(4, "4"), (4.0, "4"), (1.5, "1.5"), (4 + 1e-7, "4.0000001")],
)
def test_results_of_other_rotary_scales_have_other_names(scale, text):
  assert load.scale_text(scale) == text


@pytest.mark.parametrize(
  ("scale", "said"),
  [
    ("0.5", "--rotary_scale=0.5: give 1 or more"),
    ("0.99999999", "--rotary_scale=0.99999999: give 1 or more"),
    ("nan", "--rotary_scale=nan: give 1 or more"),
    ("4", "--rotary_scale=4: trellis has no rotary channels"),
  ],
)
def test_rotary_scales_that_are_mistakes(scale, said, call, trained):
  code, _, err = call(
    f"--checkpoint={trained}", "--task=perplexity", f"--rotary_scale={scale}"
  )
  assert code == 2
  assert said in err and err.count("\n") == 1


def test_rotary_channels_that_cannot_be_stretched(trained):
  """Not even where another mixer of the model can."""
  opened = load.open_checkpoint(trained)
  model = opened.config.model
  attention = softmax_attention.SoftmaxAttentionConfig(rotary_dim=8)
  slots = slot_attention.BoundedMemoryConfig(rotary_dim=8)
  model.mixers = {"a": attention, "b": slots}
  model.num_layers = 2
  for model.pattern in ("b", "a+b"):
    with pytest.raises(
      errors.UserError, match=": bounded_memory has rotary channels that c"
    ):
      load.stretch(opened, 4)


@pytest.mark.slow
def test_throughput(call, run_folder):
  code, out, _ = call(
    f"--checkpoint={run_folder}",
    "--task=throughput",
    "--contexts=40,8",
    "--rows=2",
  )
  assert code == 0
  result = json.loads((run_folder / "eval/throughput.json").read_text())
  assert cases.is_figure(run_folder / "eval/throughput.png")
  assert [row["context"] for row in result["throughput"]] == [8, 40]
  assert (result["batch"], result["step"]) == (2, 3)
  assert re.search(r"\n +40 +[\d,]+ +\d+\.\d{3} +\d+ +[\d,]+\n", out)
  assert "throughput.json\n" in out and "throughput.png\n" in out


def test_sample(call, trained, tmp_path):
  code, out, err = call(
    f"--checkpoint={trained}",
    "--task=sample",
    "--prompt=line ",
    "--tokens=20",
    "--temperature=1.5",
    "--top_k=9",
    "--top_p=0.8",
    "--seed=5",
  )
  assert (code, err) == (0, "")
  pieces = generate.text(
    load.open_checkpoint(trained).model,
    BYTES,
    "line ",
    tokens=20,
    settings=sample.Settings(temperature=1.5, top_k=9, top_p=0.8, seed=5),
  )
  assert out == "line " + "".join(pieces) + "\n"

  prompt = tmp_path / "prompt.txt"
  prompt.write_text("line ")
  greedy = (f"--checkpoint={trained}", "--task=sample", "--temperature=0")
  first = call(*greedy, f"--prompt_file={prompt}")
  assert first[1].startswith("line ")
  assert first == call(*greedy, "--prompt=line ", "--seed=3")
  prompt.write_bytes(b"a\r\nb\rc")  # each is a token of its own
  assert tasks.read_prompt(str(prompt)) == "a\r\nb\rc"
  nothing = call(*greedy[:2], "--prompt=line ", "--tokens=0")
  assert nothing == (0, "line \n", "")


def test_chat(call, trained, monkeypatch, tmp_path):
  said = ["line ", f"/save {tmp_path / 'talk'}", "/sav", "/quit"]
  monkeypatch.setattr("builtins.input", lambda _: said.pop(0))
  code, out, err = call(
    f"--checkpoint={trained}", "--task=chat", "--tokens=20", "--seed=5"
  )
  assert (code, err) == (0, "")
  pieces = generate.text(
    load.open_checkpoint(trained).model,
    BYTES,
    "line \n",
    tokens=20,
    settings=sample.Settings(temperature=0.8, top_p=0.95, seed=5),
  )
  assert "".join(pieces) + "\n[26 tokens read, " in out
  assert "error: /sav is no command" in out
  assert (tmp_path / "talk/session.json").exists()


def test_after_training(run_folder, capsys, monkeypatch):
  config = load.open_checkpoint(run_folder).config
  config.evaluation.byte_models = True
  monkeypatch.chdir(run_folder.parent)
  run.after_training(config, run_folder)
  out, err = capsys.readouterr()
  # On a busy machine it says how far it is.
  assert all(line.endswith(" s left") for line in err.splitlines())
  result = json.loads((run_folder / "eval/results.json").read_text())
  assert cases.is_figure(run_folder / "eval/perplexity.png")

  train = sources.open_split(config.data, "train")
  validation = sources.open_split(config.data, "validation")
  target = text.as_bytes(validation, BYTES)
  bits = byte_models.bits_per_byte(text.as_bytes(train, BYTES), target)
  rows = {r["name"]: r["bits_per_byte"] for r in result["comparison"]}
  best = min(bits, key=bits.get)
  assert list(rows) == [
    "uniform",
    "order-2 byte model",
    f"order-{best} byte model (best of 0 to 7)",
    "gzip -9",
    "xz -9",
    f"trellis, {result['parameters']:,} parameters, seed 7",
  ]
  assert rows["uniform"] == 8
  assert rows["order-2 byte model"] == bits[2]
  assert rows[f"order-{best} byte model (best of 0 to 7)"] == bits[best]
  ours = result["perplexity"]["trained_length"]
  assert list(rows.values())[-1] == ours["bits_per_byte"]
  # Each model predicts the same bytes.
  assert ours["bytes"] == len(target) - 1
  assert len(result["sample"]["text"]) == 12
  assert result["sample"]["seed"] == 7

  for name, value in rows.items():
    assert re.search(rf"^  {re.escape(name)} +{value:.3f}$", out, re.M)
  assert (
    "bits per byte by position: 2 spans of 128 tokens; trained at 32" in out
  )
  assert "\ndef " + result["sample"]["text"] in out
  assert out.endswith(
    "written:\n  run/eval/results.json\n  run/eval/perplexity.png\n"
  )


def test_without_validation_text(trained, run_folder, capsys):
  config = load.open_checkpoint(trained).config
  config.data.validation_share = 0.0
  cases.save(run_folder, config, 4)
  run.after_training(config, run_folder)
  assert "not evaluated: " in capsys.readouterr().out
  result = json.loads((run_folder / "eval/results.json").read_text())
  assert "perplexity" not in result
  assert len(result["sample"]["text"]) == 12


def test_too_much_training_text_to_count(trained, monkeypatch, capsys):
  monkeypatch.setattr(tasks, "MAX_COUNTED_BYTES", 100)
  opened = load.open_checkpoint(trained)
  rows = tasks.compare(opened, tasks.open_text(opened, ""))
  assert [row["name"] for row in rows] == ["uniform"]
  assert "byte models left out" in capsys.readouterr().out
  # Of a tokenizer whose few tokens spell many bytes.
  monkeypatch.setattr(tasks, "MAX_COUNTED_BYTES", 1_000_000)
  monkeypatch.setattr(tasks.text, "num_bytes", lambda *_: 1_000_001)
  rows = tasks.compare(opened, tasks.open_text(opened, ""))
  assert [row["name"] for row in rows] == ["uniform"]
  assert "1,000,001 bytes or more" in capsys.readouterr().out


def test_without_matplotlib(call, run_folder, monkeypatch):
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  code, out, _ = call(f"--checkpoint={run_folder}", "--task=perplexity")
  assert code == 0
  assert "no perplexity.png: matplotlib is not installed" in out
  assert (run_folder / "eval/perplexity.json").exists()
  assert not (run_folder / "eval/perplexity.png").exists()


def test_model_that_is_not_finite(run_folder, capsys):
  config = load.open_checkpoint(run_folder).config
  params = cases.tiny_params(config)
  params["embedding"] = params["embedding"] * np.nan
  cases.save(run_folder, config, 5, params=params)
  run.after_training(config, run_folder)
  result = json.loads((run_folder / "eval/results.json").read_text())
  assert result["perplexity"]["trained_length"]["bits_per_byte"] is None
  assert "sample" not in result
  out = capsys.readouterr().out
  assert "not finite bits per byte" in out
  assert "no sample: the model computes numbers that are not finite" in out


def test_steps_and_damage(run_folder, call, capsys):
  config = load.open_checkpoint(run_folder).config
  cases.save(run_folder, config, 5)
  assert load.open_checkpoint(run_folder).step == 5
  assert load.open_checkpoint(run_folder, 3).step == 3
  assert load.open_checkpoint(run_folder / "checkpoints/3").step == 3
  with pytest.raises(errors.UserError, match="3 is of step 3; leave out --st"):
    load.open_checkpoint(run_folder / "checkpoints/3", 5)
  assert load.open_checkpoint(run_folder / "checkpoints/3", 3).step == 3
  arrays = [p for p in (run_folder / "checkpoints/5/params").rglob("*/d/*")]
  arrays[0].write_bytes(arrays[0].read_bytes()[:-1])
  assert load.open_checkpoint(run_folder).step == 3
  assert "checkpoints/5 is damaged" in capsys.readouterr().out
  code, _, err = call(f"--checkpoint={run_folder}", "--task=sample", "--step=5")
  assert code == errors.EXIT_BAD_INPUT
  assert err.count("\n") == 1


def test_another_tokenizer(call, run_folder):
  config = load.open_checkpoint(run_folder).config
  cases.save(run_folder, config, 6, tokenizer="0" * 16)
  code, _, err = call(f"--checkpoint={run_folder}", "--task=sample")
  assert code == errors.EXIT_BAD_INPUT
  assert "another tokenizer" in err


def test_the_program(trained):
  command = [sys.executable, ROOT / "eval.py", "--task=sample", "--tokens=0"]
  paths = [
    *filter(None, [os.environ.get("PYTHONPATH")]),
    ROOT,
    ROOT / "kernels",
  ]
  environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
  done = subprocess.run(
    [*command, "--checkpoint=nowhere"],
    env=environment,
    capture_output=True,
    text=True,
  )
  assert done.returncode == errors.EXIT_BAD_INPUT
  assert done.stderr.count("\n") == 1
  helped = subprocess.run(
    [*command, "--help"], env=environment, capture_output=True, text=True
  )
  assert helped.returncode == 0
  for name in ("checkpoint", "task", "prompt", "temperature", "lengths"):
    assert f"  --{name}: " in helped.stdout
