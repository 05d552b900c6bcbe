"""A diagram of each of the four memories: what a token does to the state."""

import numpy as np
from style import COLOURS, Canvas


def trellis():
  """Two gradient steps towards one code, then two reads."""
  c = Canvas(9.2, 4.6)
  for row, (y, name, dim, word) in enumerate(
    ((3.35, "K", "k", "key"), (0.95, "V", "v", "value"))
  ):
    c.box(f"w{row}", 0.6, y, f"${dim}$", word)
    c.box(f"z{row}", 2.05, y, f"$z = M_{name}\\,{dim}$", w=1.15)
    c.box(
      f"u{row}", 4.05, y, "$u = J_\\varphi^T(\\varphi(z) - \\alpha)$", w=1.95
    )
    c.grid(f"m{row}", 6.55, y, 5, 4, "state")
    c.text(6.55, y - 0.66, f"$M_{name}$  $[m \\times d_{dim}]$")
    c.decay(f"m{row}", "$\\beta$")
    c.chain(f"w{row}.r z{row}.l", f"z{row}.r u{row}.l")
    c.arrow(
      f"u{row}.r", f"m{row}.l", f"$-\\gamma\\, u\\, {dim}^T$", shift=(0, 0.18)
    )
  c.box("alpha", 4.05, 2.15, "code $\\alpha$", "value", w=0.95)
  c.chain("alpha.t u0.b", "alpha.b u1.t")
  c.text(2.0, 2.15, "both memories learn to answer\nby the same code", size=10)
  c.box("q", 8.3, 4.15, "$q$", "query")
  c.box("r", 8.3, 3.35, "$M_K\\, q$", w=0.9)
  c.box("f", 8.3, 2.15, "$f(\\cdot)$", w=0.9)
  c.box("o", 8.3, 0.95, "$M_V^T f$", w=0.9)
  c.box("y", 8.3, 0.27, "$y$", "out", h=0.36)
  c.chain("q.b r.t", "r.b f.t", "f.b o.t", "o.b y.t")
  c.chain("m0.r r.l", "m1.r o.l", kind="state")
  c.text(0.3, 4.1, "pass 1 writes the key", ha="left", size=10)
  c.text(0.3, 0.3, "pass 2 writes the value", ha="left", size=10)
  return c


def lattice():
  """A slot turns on its sphere towards what the memory does not say yet."""
  c = Canvas(9.2, 4.2)
  centre, radius = np.array((6.1, 1.95)), 1.4
  angles = np.linspace(0, 2 * np.pi, 200)
  c.axes.plot(
    centre[0] + radius * np.cos(angles),
    centre[1] + radius * np.sin(angles),
    color=COLOURS["state"][1],
    linewidth=1.2,
  )

  def at(degrees, length=1.0):
    a = np.deg2rad(degrees)
    return tuple(centre + radius * length * np.array((np.cos(a), np.sin(a))))

  old, tangent = np.array(at(68)), np.array(at(68 - 90, 0.75)) - centre
  moved = old + tangent
  new = centre + radius * (moved - centre) / np.linalg.norm(moved - centre)
  for degrees in (150, 240):
    c.arrow(tuple(centre), at(degrees), kind="state")
  c.arrow(tuple(centre), tuple(old), kind="state", line="--")
  c.arrow(tuple(centre), tuple(new), kind="state")
  c.arrow(tuple(old), tuple(moved), kind="value")
  c.axes.plot(
    *zip(moved, new, strict=True), color="#333333", linewidth=1.2, linestyle=":"
  )
  c.text(*at(150, 1.16), "$s_2$")
  c.text(*at(240, 1.14), "$s_3$")
  c.text(*at(70, 1.13), "$s_1$ before")
  c.text(new[0] + 0.12, new[1] - 0.16, "$s_1$ after", ha="left")
  c.text(
    (old + moved)[0] / 2 + 0.1,
    (old + moved)[1] / 2 + 0.3,
    "$-\\gamma\\, k_1 P(s_1)\\, h$\nalong the tangent",
    ha="left",
  )
  c.text(
    moved[0] + 0.1, moved[1] - 0.02, "back to length 1", ha="left", size=10
  )
  c.text(
    6.1, 0.27, "the slots are the columns of $S$; each has length 1", size=10
  )

  c.box("k", 0.55, 3.3, "$k$", "key")
  c.box("v", 0.55, 2.3, "$v$", "value")
  c.box("said", 1.65, 3.3, "$\\Phi\\, k$", w=0.75)
  c.box("h", 3.05, 2.8, "$h = \\Phi k - v$", w=1.35)
  c.arrow("k.r", "said.l")
  c.arrow("said.r", "h.t", bend="hv")
  c.arrow("v.r", "h.b", bend="hv")
  c.arrow("h.r", at(159, 1.06), "write", shift=(0.1, 0.18))
  c.text(0.24, 3.85, "the error of what the memory says", ha="left", size=10)
  c.box("q", 0.55, 0.6, "$q$", "query")
  c.box("y", 3.05, 0.6, "$y = S\\, q$", "out", w=1.1)
  c.arrow("q.r", "y.l")
  c.arrow(at(205, 1.05), "y.r", "read", kind="state", shift=(-0.1, 0.22))
  c.box("mu", 0.75, 1.5, "decay $\\mu$", "gate", w=1.0)
  c.text(
    1.4,
    1.5,
    "how much the slot before\ncounts against its change",
    ha="left",
    size=10,
  )
  return c


def key_value_means():
  """A chunk leaves the window: its tokens become rows, or join the nearest."""
  c = Canvas(9.2, 4.4)
  cell, y = 0.24, 2.3
  c.grid("rows", 1.75, y, 2, 8, "state", cell=cell, marked={(0, 0), (1, 0)})
  c.grid("old", 4.55, y, 2, 6, "value", cell=cell)
  c.grid("mid", 6.35, y, 2, 6, "value", cell=cell)
  c.grid("new", 8.05, y, 2, 4, "value", cell=cell)
  c.text(1.9, y - 0.44, "rows: $K_i,\\ V_i$, length $\\rho_i$")
  c.text(4.55, y - 0.44, "chunk that leaves")
  c.text(6.35, y - 0.44, "chunk before")
  c.text(8.05, y - 0.44, "current chunk")
  c.frame(5.5, y - 0.65, 3.5, 1.35, "")
  c.text(7.25, y + 0.5, "window, attended to exactly", size=10)
  c.arrow((4.2, y + 0.27), (2.75, y + 0.27), bend=0.4, kind="state")
  c.text(3.5, y + 0.22, "append", size=10)
  c.arrow((4.7, y + 0.27), (1.6, y + 0.27), bend=0.42, kind="value")
  c.text(3.15, y + 1.12, "merge", size=10)
  c.text(
    0.3,
    4.05,
    "append: the tokens least like any row become rows, up to the budget",
    ha="left",
    size=10,
  )
  c.text(
    0.3,
    3.78,
    "merge: the others join their nearest row,"
    "  $K_i \\leftarrow K_i + g\\,\\bar k$,  $V_i \\leftarrow V_i + g\\,v$",
    ha="left",
    size=10,
  )
  c.text(0.74, y + 0.4, "sink", size=10)
  c.box("q", 2.0, 0.35, "$q$", "query")
  c.box("soft", 4.55, 1.0, "one softmax over rows and window", w=3.3)
  c.box("y", 7.25, 0.35, "$y$", "out")
  c.arrow((1.75, y - 0.62), "soft.l", bend="vh", kind="state")
  c.arrow((7.25, y - 0.65), "soft.r", bend="vh", kind="value")
  c.arrow("q.r", (3.4, 0.78), bend="hv")
  c.arrow((5.7, 0.78), "y.l", bend="vh")
  return c


def tensor_cache():
  """Softmax attention over a window beside an outer-product memory."""
  c = Canvas(9.95, 4.1)
  y = 3.2
  c.grid("past", 1.45, y, 2, 8, "op", cell=0.24)
  c.grid("window", 4.55, y, 2, 8, "value", cell=0.24)
  c.text(1.45, y + 0.42, "older tokens", size=10)
  c.text(4.55, y + 0.42, "window of $W$ tokens: $k_j,\\ v_j$", size=10)
  c.grid("memory", 2.05, 1.35, 4, 4, "state", cell=0.22)
  c.text(2.05, 0.75, "$A$  $[d_k \\times d_v]$")
  c.arrow(
    (2.05, 2.95),
    "memory.t",
    "$+\\,\\eta\\, k^T v$",
    shift=(0.55, 0),
    kind="value",
  )
  c.decay("memory", "$\\lambda$", side="l")
  c.box("q", 4.55, 2.1, "$q$", "query")
  c.box("local", 6.6, y, "softmax\nattention", w=1.15, h=0.6)
  c.box("read", 6.6, 1.35, "$r = q A$", w=1.15)
  c.box("gate", 8.0, 1.35, "$\\sigma(g)$", "gate", w=0.7)
  c.box("plus", 8.0, 2.3, "$+$", w=0.42)
  c.box("wo", 8.8, 2.3, "$W_o$", w=0.6)
  c.box("y", 9.6, 2.3, "$y$", "out", w=0.42)
  c.arrow("window.r", "local.l", kind="value")
  c.arrow("memory.r", "read.l", kind="state")
  c.arrow("q.r", (6.15, 2.88))
  c.arrow("q.r", (6.15, 1.59))
  c.arrow("local.r", "plus.t", bend="hv")
  c.chain("read.r gate.l", "gate.t plus.b", "plus.r wo.l", "wo.r y.l")
  c.text(
    4.6,
    0.3,
    "a token is written at the end of its chunk (all) or as it leaves the"
    " window (evicted)",
    size=10,
  )
  return c


DIAGRAMS = {
  "trellis": trellis,
  "lattice": lattice,
  "key_value_means": key_value_means,
  "tensor_cache": tensor_cache,
}
