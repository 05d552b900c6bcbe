"""Fetches metrics behind the device and writes those of logged steps."""

import collections
from typing import Any

import jax

from memcomp import config as config_lib
from memcomp.models import abstract, overview
from memcomp.training import flops, metrics

_IN_FLIGHT = 2
"""Steps that the device may be ahead of the host's reading: enough that it
never waits, few enough that a request to stop is met at once."""


class Recorder:
  """Turns device metrics into records, two steps late.

  What a clock measured joins `metrics.record_of`: `seconds_per_step` since the
  last record, `tokens_per_second` (all tokens of the batch, padding too),
  `model_tflops_per_second` and `mfu` (see `flops`; "unknown" where the device's
  peak is), beside `state_bytes` of the memories of one sequence.

  Attributes:
    skipped_in_a_row: not finite steps that end at the last one fetched.
    worst: the most of them in a row so far.
    came_back: steps fetched.
    stop: whether a step has handed back a request to stop.
    last: the last record written, or None.
  """

  def __init__(
    self,
    config: config_lib.Config,
    mesh: jax.sharding.Mesh,
    log: metrics.Log,
    progress: metrics.Progress,
  ):
    self._log = log
    self._progress = progress
    self._devices = list(mesh.devices.flat)
    length = config.data.sequence_length
    self._flops = flops.per_token(
      config.model, abstract.model_of(config.model), length
    )
    self._slots: list[int] = []
    self._state_bytes = overview.state_bytes(config.model, length)
    self._pending = collections.deque()
    self._meter = metrics.Meter()
    self._unreached = 0
    self.came_back = 0
    self.skipped_in_a_row = 0
    self.worst = 0
    self.stop = False
    self.last: dict[str, Any] | None = None

  def add(
    self,
    device_metrics: dict[str, jax.Array],
    *,
    slots: int,
    logged: bool,
    extra: dict[str, float | None] | None = None,
  ) -> None:
    """Takes the metrics of a step of `slots` tokens; `extra` joins its record.

    Args:
      device_metrics: of `step.make_train_step`.
      slots: tokens of the batch, padding too.
      logged: whether to write a record of it.
      extra: what joins it.
    """
    wanted = device_metrics if logged else _counter(device_metrics)
    for x in wanted.values():
      x.copy_to_host_async()
    self._pending.append((wanted, slots, logged, extra or {}))
    self._fetch(_IN_FLIGHT)

  def drain(self) -> None:
    """Waits for every step handed in so far."""
    self._fetch(0)

  def pause(self, seconds: float) -> None:
    """Leaves time that was not spent training out of the speed."""
    self._meter.pause(seconds)

  def _fetch(self, limit: int) -> None:
    while len(self._pending) > limit:
      wanted, slots, logged, extra = self._pending.popleft()
      self._slots.append(slots)
      fetched = jax.device_get(wanted)
      self.came_back += 1
      self.skipped_in_a_row = int(fetched["skipped_in_a_row"])
      self.worst = max(self.worst, self.skipped_in_a_row)
      self.stop = self.stop or bool(fetched.pop("stop", 0))
      if "unreached" in fetched:
        # Of all steps since the last record.
        self._unreached = self._unreached + fetched["unreached"]
        fetched["unreached"] = self._unreached
      if logged:
        self._write(metrics.record_of(fetched) | extra)
        self._unreached = 0
        self._slots = []

  def _write(self, record: dict[str, Any]) -> None:
    record["state_bytes"] = self._state_bytes
    seconds = self._meter.lap(record["step"])
    if seconds is not None:
      speed = sum(self._slots) / len(self._slots) / seconds
      record["seconds_per_step"] = seconds
      record["tokens_per_second"] = speed
      record["model_tflops_per_second"] = self._flops * speed / 1e12
      used = flops.utilisation(self._flops * speed, self._devices)
      record["mfu"] = "unknown" if used is None else used
    self._log.write(record)
    self._progress.show(record)
    self.last = record


def _counter(device_metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
  names = "skipped_in_a_row", "unreached", "stop"
  return {x: device_metrics[x] for x in names if x in device_metrics}
