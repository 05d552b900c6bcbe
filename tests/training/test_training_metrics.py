import io
import json
import math
import sys

import jax
import numpy as np
import pytest
import training_cases

from memcomp import errors, figures
from memcomp.models import abstract, overview
from memcomp.training import flops, metrics, plot, run


def _record(step, **fields):
  return {
    "step": step,
    "loss": 2.0,
    "bits_per_byte": 3.0,
    "skipped": 0,
    "memory_norms": [0.5, 0.25],
  } | fields


def _lines(folder):
  return (folder / metrics.FILE).read_text().splitlines()


def test_one_object_a_line_at_once(tmp_path):
  with metrics.Log(tmp_path, resume_at=0, tensorboard=False) as log:
    log.write(_record(1, loss=math.nan, grad_norm=math.inf))
    (line,) = _lines(tmp_path)
  record = json.loads(line)
  assert record["loss"] is None and record["grad_norm"] is None
  assert record["memory_norms"] == [0.5, 0.25]


@pytest.mark.parametrize("tail", ["", '{"step": 3, "lo', "\0\0\0"])
def test_resuming_drops_what_came_after(tmp_path, tail):
  with metrics.Log(tmp_path, resume_at=0, tensorboard=False) as log:
    for step in range(1, 6):
      log.write(_record(step))
  with open(tmp_path / metrics.FILE, "a") as file:
    file.write(tail)
  with metrics.Log(tmp_path, resume_at=3, tensorboard=False) as log:
    log.write(_record(4))
  assert [json.loads(x)["step"] for x in _lines(tmp_path)] == [1, 2, 3, 4]


def test_a_line_cut_short_is_dropped(tmp_path):
  path = tmp_path / metrics.FILE
  path.write_text('{"step": 1}\n{"step": 2')
  assert metrics.read(path) == [{"step": 1}]
  metrics.truncate(path, 9)
  assert path.read_text() == '{"step": 1}\n'


@pytest.mark.parametrize("bad", ["\0\0\0", "[]", '{"step": "2"}', "{}", ""])
def test_a_bad_line_does_not_take_the_others_along(tmp_path, bad):
  path = tmp_path / metrics.FILE
  path.write_text(f'{{"step": 1}}\n{bad}\n{{"step": 3}}\n{{"step": 4}}\n')
  assert [record["step"] for record in metrics.read(path)] == [1, 3, 4]
  metrics.truncate(path, 3)
  assert path.read_text() == '{"step": 1}\n{"step": 3}\n'
  assert [p.name for p in tmp_path.iterdir()] == [metrics.FILE]


def test_bits_per_byte_counts_bytes_not_tokens():
  fetched = dict.fromkeys(
    ("learning_rate", "grad_norm", "z_loss"), np.float32(0)
  )
  fetched |= {"step": 1, "skipped": 0, "memory_norms": np.zeros(2)}
  record = metrics.record_of(
    fetched | {"loss": np.float32(2), "tokens": 10, "bytes": 40}
  )
  assert record["bits_per_byte"] == pytest.approx(2 * 10 / 40 / math.log(2))


def test_a_step_that_scores_nothing_has_no_figures():
  fetched = dict.fromkeys(
    ("loss", "accuracy", "learning_rate", "grad_norm", "z_loss"), np.float32(0)
  )
  fetched |= {"step": 3, "skipped": 0, "memory_norms": np.zeros(2)}
  record = metrics.record_of(fetched | {"tokens": 0, "bytes": 0})
  for name in ("loss", "bits_per_byte", "accuracy"):
    assert record[name] is None
  out = io.StringIO()
  record |= {"validation_accuracy": None}
  metrics.StepProgress(9, out).show(record)
  assert out.getvalue() == (
    "step 3/9  nothing was scored  validation of nothing\n"
  )
  # Tokens that stand for no bytes have a loss.
  record = metrics.record_of(
    fetched | {"loss": np.float32(2), "tokens": 5, "bytes": 0}
  )
  assert record["loss"] == 2 and record["bits_per_byte"] is None
  assert "loss 2.0000  accuracy 0.000" in _shown(record)
  del record["accuracy"]
  assert "loss 2.0000  of nothing bits/byte" in _shown(record)


def _shown(record):
  out = io.StringIO()
  metrics.StepProgress(9, out).show(record)
  return out.getvalue()


class _Terminal(io.StringIO):
  def isatty(self):
    return True


def test_a_terminal_gets_one_line_that_overwrites_itself():
  out = _Terminal()
  progress = metrics.StepProgress(10, out)
  for step in (1, 2):
    progress.show(_record(step, seconds_per_step=2.0, tokens_per_second=1234.0))
  progress.end()
  text = out.getvalue()
  assert text.count("\r") == 2 and text.count("\n") == 1
  assert text.endswith("\n")
  for part in ("step 2/10", "loss 2.0000", "3.000 bits/byte"):
    assert part in text
  assert "1,234 tokens/s" in text and "16s left" in text


def test_elsewhere_each_record_has_a_line():
  out = io.StringIO()
  progress = metrics.StepProgress(10, out)
  for step in (1, 2):
    progress.show(_record(step, skipped=3, validation_bits_per_byte=2.5))
  progress.end()
  assert "\r" not in out.getvalue() and out.getvalue().count("\n") == 2
  assert "skipped 3" in out.getvalue()
  assert "validation 2.500" in out.getvalue()


@pytest.mark.parametrize(
  ("seconds", "text"), [(12.4, "12s"), (192, "3m12s"), (7380, "2h03m")]
)
def test_durations(seconds, text):
  assert metrics.duration(seconds) == text


def test_the_meter_leaves_pauses_out(monkeypatch):
  clock = iter([10.0, 16.0])
  monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
  meter = metrics.Meter()
  assert meter.lap(1) is None
  meter.pause(2.0)
  assert meter.lap(3) == 2.0


def test_tensorboard_files(tmp_path):
  pytest.importorskip("tensorboardX")
  with metrics.Log(tmp_path, resume_at=0, tensorboard=True) as log:
    log.write(_record(1))
  (file,) = (tmp_path / "tensorboard").iterdir()
  content = file.read_bytes()
  assert b"loss" in content and b"memory_norms/1" in content


def test_tensorboard_without_its_library(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "tensorboardX", None)
  with pytest.raises(errors.UserError, match=r"memcomp\[tb\]"):
    metrics.Log(tmp_path, resume_at=0, tensorboard=True)


def test_loss_curve(tmp_path):
  pytest.importorskip("matplotlib")
  with metrics.Log(tmp_path, resume_at=0, tensorboard=False) as log:
    for step in range(1, 5):
      log.write(_record(step, bits_per_byte=math.nan if step == 2 else 3.0))
  assert "loss.png" in plot.loss_curve(tmp_path)
  assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_fall_of_the_first_steps_does_not_flatten_the_curve(
  tmp_path, monkeypatch
):
  pytest.importorskip("matplotlib")
  drawn = []
  monkeypatch.setattr(figures, "save", lambda canvas, _: drawn.append(canvas))
  bits = [16.0, 5.0, math.nan, *(3 - i / 100 for i in range(97))]
  with metrics.Log(tmp_path, resume_at=0, tensorboard=False) as log:
    for step, x in enumerate(bits, 1):
      log.write(_record(step, bits_per_byte=x))
  plot.loss_curve(tmp_path)
  low, high = drawn[0].axes[0].get_ylim()
  assert 1.9 < low < 2.04 and 3.0 < high < 4.0


@pytest.mark.parametrize(
  "name", ["a$b", "a$b$c", "$x^$_{", "a\\$b$", "a_b^c%#&", "\udcff", "\x01日本"]
)
def test_any_name_of_a_folder(tmp_path, name):
  pytest.importorskip("matplotlib")
  folder = tmp_path / name
  folder.mkdir()
  (folder / metrics.FILE).write_text('{"step": 1, "bits_per_byte": 3.0}\n')
  assert "loss.png" in plot.loss_curve(folder)
  assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_text_stands_in_a_figure_as_it_is(tmp_path):
  pytest.importorskip("matplotlib")
  canvas = figures.new_canvas(3, 2)
  axes = canvas.subplots()
  axes.plot([1, 1000], [1, 1000], label="$a$")
  axes.set(title="$b$", xscale="log")
  axes.set_yticks([1, 1000], ["$c$", "d"])
  figures.save(canvas, tmp_path / "a.png")
  assert not axes.title.get_parse_math()
  assert not axes.get_yticklabels()[0].get_parse_math()
  # The markup of numbers at an axis is matplotlib's.
  assert "mathdefault" in axes.get_xticklabels()[1].get_text()
  assert axes.get_xticklabels()[1].get_parse_math()


def test_no_matplotlib_is_said(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  assert "matplotlib is not installed" in plot.loss_curve(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_flops_count_matrices_and_the_head_but_not_the_lookup(tied):
  config = training_cases.tiny().model
  config.tied_embeddings = tied
  config.num_layers = 3
  model = abstract.model_of(config)
  d, inner, ff, slots, heads = 32, 16, 32, 4, 2
  # W_qk, W_v, W_g, W_o; alpha; two gates; SwiGLU.
  mixer = 4 * d * inner + d * heads * slots + 2 * d * heads
  count = 256 * d + 3 * (mixer + 3 * d * ff)
  got = flops.matmul_params(model)
  assert got == count
  memory = overview.memory_flops_per_token(config, 64)
  assert flops.per_token(config, model, 64) == 6 * got + 3 * memory


class _Device:
  def __init__(self, kind):
    self.device_kind = kind


def test_utilisation_where_the_peak_is_known():
  v5e = [_Device("TPU v5 lite")] * 4
  assert flops.utilisation(197e12 * 4 * 0.25, v5e) == pytest.approx(0.25)
  assert flops.utilisation(1e12, jax.devices("cpu")) is None


@pytest.mark.usefixtures("leaky_model")
def test_tensorboard_by_config(tmp_path, text):
  pytest.importorskip("tensorboardX")
  config = training_cases.tiny(text, tensorboard=True)
  run.run(config, tmp_path / "a")
  assert list((tmp_path / "a/tensorboard").iterdir())


@pytest.mark.usefixtures("leaky_model")
def test_tensorboard_missing(tmp_path, text, monkeypatch):
  monkeypatch.setitem(sys.modules, "tensorboardX", None)
  config = training_cases.tiny(text, tensorboard=True)
  with pytest.raises(errors.UserError, match=r"memcomp\[tb\]"):
    run.run(config, tmp_path / "a")
