"""Fetches device metrics with a delay, and writes those of logged steps."""

import collections
from typing import Any

import jax

from memcomp import config as config_lib
from memcomp.models import abstract, overview
from memcomp.training import flops, metrics

_IN_FLIGHT = 2
"""Maximum number of steps that the device is ahead of the host: enough to never
wait, and few enough to react to a stop request at once."""


class Recorder:
  """Turns device metrics into records, two steps late.

  It adds timings to `metrics.record_of`: `seconds_per_step` since the last
  record, `tokens_per_second` (all tokens of the batch, with padding),
  `model_tflops_per_second`, `mfu` (see `flops`; "unknown" if the device's peak
  is), and `state_bytes` of the memories per sequence.

  Attributes:
    skipped_in_a_row: consecutive non-finite steps up to the last one fetched.
    worst: maximum of `skipped_in_a_row` so far.
    came_back: number of fetched steps.
    stop: whether a step has returned a request to stop.
  """

  def __init__(
    self,
    config: config_lib.Config,
    mesh: jax.sharding.Mesh,
    log: metrics.Log,
    progress: metrics.StepProgress,
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

  def add(
    self,
    device_metrics: dict[str, jax.Array],
    *,
    slots: int,
    logged: bool,
    extra: dict[str, float | None] | None = None,
  ) -> None:
    """Adds the metrics of a step.

    Args:
      device_metrics: metrics of `step.make_train_step`.
      slots: tokens of the batch, with padding.
      logged: whether to write a record.
      extra: further entries of the record.
    """
    wanted = device_metrics if logged else _counter(device_metrics)
    for x in wanted.values():
      x.copy_to_host_async()
    self._pending.append((wanted, slots, logged, extra or {}))
    self._fetch(_IN_FLIGHT)

  def drain(self) -> None:
    """Waits for all steps that have been added."""
    self._fetch(0)

  def pause(self, seconds: float) -> None:
    """Excludes time that was not spent training from the speed."""
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
        # Accumulate over all steps since the last record.
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


def _counter(device_metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
  names = "skipped_in_a_row", "unreached", "stop"
  return {x: device_metrics[x] for x in names if x in device_metrics}
