"""What the tasks make of a run's settings."""

import dataclasses

from memcomp.evaluation import load, tasks


def test_a_run_without_a_sample_at_its_end_samples_and_chats(
  trained, monkeypatch, capsys
):
  opened = load.open_checkpoint(trained)
  none = opened.config.evaluation
  none.sample_tokens = 0
  asked = []

  def text(*unused, tokens, **more):
    asked.append(tokens)
    return iter([])

  monkeypatch.setattr(tasks.generate, "text", text)
  tasks.show_sample(opened, none, 0, ["stop"])
  tasks.show_sample(opened, none, 0)  # as after training
  given = dataclasses.replace(none, sample_tokens=3)
  tasks.show_sample(opened, given, 0, [])
  assert asked == [400, 0, 3]
  monkeypatch.setattr("builtins.input", lambda _: "/quit")
  tasks.talk(opened, none, 0)
  assert "/help" in capsys.readouterr().out
