"""Diagrams of the architecture and of time over devices."""

from style import Canvas


def architecture():
  """From the trainer down to the kernels."""
  c = Canvas(9.2, 6.5)
  c.frame(0.2, 4.4, 8.8, 1.95, "memcomp: models and training")
  c.box("cmd", 1.15, 5.65, "memcomp train,\neval, chat", w=1.5, h=0.66, size=10)
  c.box(
    "trainer",
    3.15,
    5.65,
    "trainer\n(optax, orbax, grain)",
    w=1.8,
    h=0.66,
    size=10,
  )
  c.box(
    "decoder", 5.25, 5.65, "Decoder\n(blocks of layers)", w=1.6, h=0.66, size=10
  )
  c.box(
    "layer",
    7.7,
    5.65,
    "layer, for example Trellis\n(projections, gates)",
    w=2.3,
    h=0.66,
    size=10,
  )
  for pair in ("cmd.r trainer.l", "trainer.r decoder.l", "decoder.r layer.l"):
    c.arrow(*pair.split())
  c.box(
    "yours",
    5.25,
    4.75,
    "your own model (Flax, Linen, Equinox)",
    "out",
    w=3.3,
    h=0.4,
    size=10,
  )
  c.arrow("yours.r", (7.35, 5.32), bend="hv")
  c.frame(
    0.2, 0.15, 8.8, 4.1, "memcomp_kernels: memories as functions of arrays"
  )
  c.box(
    "shard", 4.6, 3.5, "parallel: batch, heads and time over devices", w=4.9
  )
  c.box("op", 4.6, 2.75, "op: checks shapes, dtypes and packed rows", w=4.9)
  c.box(
    "dispatch",
    4.6,
    2.0,
    "dispatch: the implementation for this platform",
    w=4.9,
  )
  c.arrow("layer.b", "shard.r", bend="vh")
  c.arrow("shard.b", "op.t")
  c.arrow("op.b", "dispatch.t")
  c.text(7.95, 2.75, "or call\nan op yourself", size=10)
  c.arrow((7.35, 2.75), "op.r")
  for name, x, text in (
    ("reference", 1.3, "reference\nthe paper's recurrence,\ntoken by token"),
    ("xla", 3.5, "xla_chunked\nchunks of tokens as\nmatrix products"),
    ("tpu", 5.7, "mosaic_tpu\nPallas kernels\nfor TPUs"),
    ("gpu", 7.9, "mosaic_gpu\nPallas kernels\nfor Hopper GPUs"),
  ):
    c.box(name, x, 1.0, text, "state", w=1.95, h=0.82, size=10)
  c.arrow((3.0, 1.78), (1.3, 1.41))
  c.arrow((3.9, 1.78), (3.5, 1.41))
  c.arrow((5.3, 1.78), (5.7, 1.41))
  c.arrow((6.2, 1.78), (7.9, 1.41))
  c.text(
    4.6,
    0.36,
    "each computes the outputs, final states and gradients of the reference",
    size=10,
  )
  return c


def time_shards():
  """Three ways for shards of time to pass the state on."""
  c = Canvas(9.2, 6.1)
  # Wavefront.
  c.text(
    0.25, 5.85, "wavefront: every memory", ha="left", size=11.5, weight="bold"
  )
  c.text(
    0.25,
    5.55,
    "device $s$ runs part $p$ of the rows and heads in turn $p + s$, then sends"
    " the state on",
    ha="left",
    size=10,
  )
  for s in range(4):
    c.text(0.95, 5.1 - s * 0.42, f"device {s}", size=10)
    for p in range(4):
      c.box(
        f"p{s}{p}",
        2.2 + (p + s) * 0.95,
        5.1 - s * 0.42,
        f"part {p}",
        "state",
        w=0.78,
        h=0.3,
        size=9.5,
      )
  for s in range(3):
    for p in range(4):
      c.arrow(f"p{s}{p}.b", f"p{s + 1}{p}.t", kind="state")
  c.arrow((1.6, 3.45), (8.6, 3.45), "turns", shift=(0, -0.17))
  # Linear.
  c.text(
    0.25,
    2.95,
    "linear: memories that are linear in their state",
    ha="left",
    size=11.5,
    weight="bold",
  )
  c.text(
    0.25,
    2.65,
    "all devices run at once from nothing ($B$); what each makes of a state"
    " ($D$) is combined in $\\log_2 s$ steps",
    ha="left",
    size=10,
  )
  for s in range(4):
    x = 1.3 + s * 2.2
    c.box(
      f"l{s}",
      x,
      2.2,
      f"device {s}: $(D_{s}, B_{s})$",
      "state",
      w=1.75,
      h=0.34,
      size=10,
    )
    if s:
      c.arrow(f"l{s - 1}.r", f"l{s}.l", kind="state")
    if s > 1:
      c.arrow(f"l{s - 2}.b", f"l{s}.b", bend=0.12, kind="state", line="--")
  # Windows.
  c.text(0.25, 1.6, "window: attention", ha="left", size=11.5, weight="bold")
  c.text(
    0.25,
    1.3,
    "each device is handed the keys and values of the window before its tokens",
    ha="left",
    size=10,
  )
  for s in range(4):
    x = 1.3 + s * 2.2
    c.grid(f"k{s}", x, 0.75, 1, 7, "value", cell=0.24, marked={(0, 5), (0, 6)})
    c.text(x, 0.42, f"device {s}", size=10)
    if s:
      c.arrow((x - 2.2 + 0.6, 0.89), (x - 0.72, 0.89), bend=-0.4, kind="value")
  return c


DIAGRAMS = {"architecture": architecture, "time_shards": time_shards}
