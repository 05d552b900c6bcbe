"""Which steps are traced, and what a trace leaves."""

import jax
import pytest
import training_cases

from memcomp.training import profiler, run


@pytest.mark.parametrize(
  ("start", "first", "expected"),
  [(3, 0, [3, 4]), (3, 3, [3, 4]), (3, 5, [5, 6]), (7, 5, [7]), (-1, 5, [])],
)
def test_the_window_of_a_process(start, first, expected, tmp_path, monkeypatch):
  traced, tracing = [], []
  monkeypatch.setattr(jax.profiler, "start_trace", tracing.append)
  monkeypatch.setattr(jax.profiler, "stop_trace", tracing.clear)
  config = training_cases.tiny(profile_start=start, profile_steps=2).training
  with profiler.Window(config, tmp_path, print, first=first) as window:
    for index in range(first, config.steps):
      window.before(index)
      traced += [index] * len(tracing)
      window.after(index, ())
  assert traced == expected
  assert not tracing


@pytest.mark.usefixtures("leaky_model")
def test_a_run_leaves_a_trace(tmp_path, text, capsys):
  config = training_cases.tiny(text, profile_start=3, profile_steps=2)
  run.run(config, tmp_path / "a")
  assert "profiler trace" in capsys.readouterr().out
  assert list((tmp_path / "a/profile").rglob("*.xplane.pb"))
