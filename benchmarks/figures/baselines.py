"""A diagram of each baseline: what a token does to the state."""

from style import Canvas


def _error_memory(memory, shape, decay, said, error, write, read, note, **how):
  """The key asks the memory, the error of its answer is written, q reads."""
  c = Canvas(9.2, 3.6)
  c.box("k", 0.6, 2.75, how.get("key", "$k$"), "key", w=how.get("kw", 0.62))
  c.box("v", 0.6, 1.85, "$v$", "value")
  c.box("said", 2.3, 2.75, said, w=1.5)
  c.box("e", 4.15, 1.85, error, w=1.35)
  c.grid("m", 6.6, 1.85, 5, 5, "state")
  c.text(6.6, 1.18, f"${memory}$  {shape}")
  c.chain("k.r said.l", "v.r e.l")
  c.arrow("said.r", "e.t", bend="hv")
  c.arrow("e.r", "m.l", write, shift=(0, 0.18))
  if decay:
    c.decay("m", decay)
  c.box("q", 0.6, 0.8, how.get("query", "$q$"), "query")
  c.box("y", 8.35, 0.8, read, "out", w=1.3)
  c.arrow("q.r", "y.l")
  c.arrow("m.r", "y.t", bend="hv", kind="state")
  c.text(0.3, 0.25, note, ha="left", size=10)
  return c


def delta_rule():
  """What a key is answered is corrected."""
  return _error_memory(
    "S",
    "$[d_k \\times d_v]$",
    "$\\alpha$",
    "$(\\alpha S)^T k$",
    "$e = v - (\\cdot)$",
    "$+\\,\\beta\\, k\\, e^T$",
    "$y = S^T q$",
    "the memory answers the key; the token writes the error of the answer",
  )


def rwkv7():
  """One key removes, another writes."""
  c = Canvas(9.2, 3.6)
  c.box("r", 0.75, 3.1, "$\\hat\\kappa$", "key")
  c.box("k", 0.75, 2.2, "$\\tilde k$", "key")
  c.box("v", 0.75, 1.5, "$v$", "value")
  c.box("u", 2.5, 3.1, "$u = S^T \\hat\\kappa$", w=1.3)
  c.box("off", 4.5, 3.1, "$-(a \\odot \\hat\\kappa)\\, u^T$", w=1.6)
  c.box("on", 4.5, 1.85, "$+\\,\\tilde k\\, v^T$", w=1.6)
  c.grid("m", 6.85, 2.2, 5, 5, "state")
  c.text(6.85, 1.53, "$S$  $[d_k \\times d_v]$")
  c.chain("r.r u.l", "u.r off.l")
  c.arrow("k.r", (3.7, 1.95))
  c.arrow("v.r", (3.7, 1.75))
  c.arrow("off.r", (6.35, 2.45), "remove", shift=(-0.28, -0.12))
  c.arrow("on.r", (6.35, 2.0), "write", shift=(0, -0.2))
  c.decay("m", "$w$, by channel", w=1.45)
  c.box("q", 0.75, 0.75, "$r$", "query")
  c.box("y", 8.4, 0.75, "$y = S^T r$", "out", w=1.25)
  c.arrow("q.r", "y.l")
  c.arrow("m.r", "y.t", bend="hv", kind="state")
  c.text(
    0.3,
    0.22,
    "one key says what is removed, another says where the value is written",
    ha="left",
    size=10,
  )
  return c


def _sum_memory(key, value, query, memory, shape, decay, write, read, **how):
  """An outer product is added; q reads."""
  c = Canvas(9.2, 3.3)
  c.box("k", 0.7, 2.5, key, "key", w=0.8)
  c.box("v", 0.7, 1.6, value, "value", w=0.8)
  c.box("w", 3.0, 2.05, write, w=how.get("ww", 1.6))
  c.grid("m", 5.6, 2.05, 5, 5, "state")
  c.text(5.6, 1.38, f"${memory}$  {shape}")
  c.arrow("k.r", "w.t", bend="hv")
  c.arrow("v.r", "w.b", bend="hv")
  c.arrow("w.r", "m.l", "$+$", shift=(0, 0.16))
  if decay:
    c.decay("m", decay, w=how.get("dw", 0.62))
  c.box("q", 0.7, 0.75, query, "query", w=0.8)
  c.box("y", 8.0, 0.75, read, "out", w=how.get("rw", 1.9))
  c.arrow("q.r", "y.l")
  c.arrow("m.r", "y.t", bend="hv", kind="state")
  c.text(0.3, 0.22, how["note"], ha="left", size=10)
  return c


def linear_attention():
  """Outer products of features are summed."""
  c = _sum_memory(
    "$\\phi(k)$",
    "$v$",
    "$\\phi(q)$",
    "S",
    "$[d_k \\times d_v]$",
    "$\\alpha$, optional",
    "$\\phi(k)\\, v^T$",
    "$y = S^T \\phi(q)\\,/\\,z^T \\phi(q)$",
    note="a sum $z$ of the features alone divides the read",
    rw=2.1,
    dw=1.2,
  )
  c.grid("z", 6.45, 2.05, 5, 1, "state")
  c.text(6.45, 2.72, "$z$")
  return c


def state_space_duality():
  """A state that decays by token and head."""
  return _sum_memory(
    "$B$",
    "$x$",
    "$C$",
    "h",
    "$[N \\times P]$",
    "$e^{\\Delta A}$",
    "$\\Delta\\, B\\, x^T$",
    "$y = h^T C + D x$",
    note="the step $\\Delta$ of a token says how much it writes and how much"
    " the state decays",
    dw=0.75,
  )


def infini_attention():
  """Softmax attention in a segment, a linear memory of all before it."""
  c = Canvas(9.2, 3.9)
  y = 3.05
  c.grid("past", 1.45, y, 2, 8, "op", cell=0.24)
  c.grid("segment", 4.5, y, 2, 6, "value", cell=0.24)
  c.text(1.45, y + 0.42, "segments before", size=10)
  c.text(4.5, y + 0.42, "current segment", size=10)
  c.grid("memory", 1.45, 1.3, 4, 4, "state", cell=0.22)
  c.grid("z", 2.15, 1.3, 4, 1, "state", cell=0.22)
  c.text(1.6, 0.68, "$M$  $[d_k \\times d_v]$ and $z$")
  c.arrow(
    (1.45, 2.8),
    "memory.t",
    "$+\\,\\sigma(k)^T(v - \\mathrm{read})$\nat a segment's end",
    shift=(0.12, 0),
    ha="left",
    kind="value",
  )
  c.box("q", 4.5, 2.1, "$q$", "query")
  c.box("local", 6.5, y, "softmax\nattention", w=1.15, h=0.6)
  c.box("read", 6.5, 1.3, "$\\sigma(q) M / \\sigma(q) z$", w=1.6)
  c.box("g", 8.15, 2.2, "gate $g$", "gate", w=0.8)
  c.box("y", 8.95, 2.2, "$y$", "out", w=0.36)
  c.arrow("segment.r", "local.l", kind="value")
  c.arrow("z.r", "read.l", kind="state")
  c.arrow("q.r", (6.05, 2.73))
  c.arrow("q.r", (6.05, 1.54))
  c.arrow("local.r", "g.t", bend="hv")
  c.arrow("read.r", "g.b", bend="hv")
  c.arrow("g.r", "y.l")
  c.text(7.9, 2.75, "$1 - g$", size=10, ha="right")
  c.text(7.9, 1.65, "$g$", size=10, ha="right")
  c.text(
    0.3,
    0.22,
    "the gate mixes what the segment and what the memory answer",
    ha="left",
    size=10,
  )
  return c


def slot_attention():
  """Slots take up tokens at paces of their own; a softmax reads them."""
  c = Canvas(9.2, 3.5)
  c.box("k", 0.7, 2.75, "$k$", "key")
  c.box("v", 0.7, 1.65, "$v$", "value")
  c.box("w", 2.6, 2.2, "$w_i = 1 - a_i$\none a slot", "gate", w=1.4, h=0.66)
  c.grid("keys", 5.0, 2.2, 5, 3, "state")
  c.grid("values", 6.4, 2.2, 5, 3, "state")
  c.text(5.0, 1.52, "$\\tilde K$  $[m \\times d_k]$")
  c.text(6.4, 1.52, "$\\tilde V$  $[m \\times d_v]$")
  c.arrow("k.r", "w.t", bend="hv")
  c.arrow("v.r", "w.b", bend="hv")
  c.frame(4.4, 1.3, 2.6, 1.85)
  c.arrow("w.r", (4.4, 2.2))
  c.text(5.7, 2.97, "row $i$:  $a_i \\cdot$ row $+\\ w_i\\cdot$ token", size=10)
  c.box("q", 0.7, 0.75, "$q$", "query")
  c.box("p", 5.0, 0.75, "$p = \\mathrm{softmax}(\\tilde K q)$", w=2.1)
  c.box("y", 8.2, 0.75, "$y = \\tilde V^T p$", "out", w=1.3)
  c.chain("q.r p.l", "p.r y.l")
  c.arrow((5.0, 1.38), "p.t", kind="state")
  c.arrow((7.0, 2.2), "y.t", bend="hv", kind="state")
  c.text(
    0.3,
    0.22,
    "every slot takes up the token at a pace of its own",
    ha="left",
    size=10,
  )
  return c


def two_pass_delta():
  """A delta rule on a key encoder, then one on a value decoder."""
  c = Canvas(9.2, 4.0)
  c.box("x", 0.6, 2.95, "$x$", "query")
  c.box("k", 0.6, 2.1, "$k$", "key")
  c.box("v", 0.6, 1.35, "$v$", "value")
  c.box("e0", 2.3, 2.95, "$e = S_K^T x - k$", w=1.55)
  c.grid("m0", 4.35, 2.75, 4, 4, "state")
  c.box("code", 5.95, 2.75, "code $c$", w=0.9)
  c.box("e1", 5.95, 1.35, "$e = S_V^T c - v$", w=1.55)
  c.grid("m1", 7.95, 1.35, 4, 4, "state")
  c.text(4.35, 2.2, "$S_K$")
  c.text(7.95, 0.82, "$S_V$")
  c.chain("x.r e0.l", "m0.r code.l", "code.b e1.t", "v.r e1.l")
  c.arrow("k.r", "e0.b", bend="hv")
  c.arrow("e0.r", (3.95, 2.95), "$-\\theta x e^T$", shift=(0, 0.18))
  c.arrow("e1.r", "m1.l", "$-\\theta c\\, e^T$", shift=(0.02, 0.18))
  c.decay("m0", "$1-\\alpha$", w=0.8)
  c.decay("m1", "$1-\\alpha$", w=0.8)
  c.box("q", 0.6, 0.45, "$q$", "query")
  c.box("y", 4.35, 0.45, "$y = S_V^T\\,\\mathrm{nsilu}(S_K^T q)$", "out", w=2.6)
  c.arrow("q.r", "y.l")
  c.text(
    5.9,
    0.42,
    "the second pass never sees the key,\nonly its code",
    ha="left",
    size=10,
  )
  return c


def ovq():
  """A chunk is attended to exactly, then joins rows or becomes new ones."""
  c = Canvas(9.2, 4.1)
  cell, y = 0.26, 2.25
  c.grid("rows", 2.4, y, 2, 9, "state", cell=cell)
  c.grid("chunk", 6.9, y, 2, 8, "value", cell=cell)
  c.text(2.4, y - 0.45, "dictionary: means $K_i, V_i$ and counts $c_i$")
  c.text(6.9, y - 0.45, "current chunk, attended to exactly")
  c.arrow((6.4, y + 0.28), (3.3, y + 0.28), bend=0.35, kind="state")
  c.text(4.75, y + 0.42, "new rows", size=10)
  c.arrow((7.2, y + 0.28), (1.9, y + 0.28), bend=0.32, kind="value")
  c.text(4.5, y + 0.97, "join", size=10)
  c.text(
    0.3,
    3.8,
    "when the chunk is complete: the tokens least like any row become new rows,"
    " as many as the schedule says;",
    ha="left",
    size=10,
  )
  c.text(
    0.3,
    3.54,
    "the others join their nearest row, which stays the mean of its tokens",
    ha="left",
    size=10,
  )
  c.box("q", 2.4, 0.35, "$q$", "query")
  c.box("soft", 4.7, 1.0, "one softmax, $+\\log c_i$ on rows", w=3.1)
  c.box("y", 6.9, 0.35, "$y$", "out")
  c.arrow((2.4, y - 0.62), "soft.l", bend="vh", kind="state")
  c.arrow((6.9, y - 0.62), "soft.r", bend="vh", kind="value")
  c.arrow("q.r", (3.7, 0.78), bend="hv")
  c.arrow((5.7, 0.78), "y.l", bend="vh")
  return c


def test_time_training():
  """The memory is a small model that each token trains."""
  c = Canvas(9.2, 3.6)
  c.box("k", 0.6, 2.75, "$k$", "key")
  c.box("v", 0.6, 1.85, "$v$", "value")
  c.box("f", 2.3, 2.75, "$f(k;\\, W)$", w=1.3)
  c.box("loss", 4.1, 2.3, "$\\frac{1}{2}|f(k;\\, W) - v|^2$", w=1.8, h=0.55)
  c.frame(5.95, 1.2, 1.95, 1.95, "small model", kind="state")
  c.grid("w", 6.92, 2.0, 4, 6, "state")
  c.text(6.92, 1.38, "weights $W$")
  c.arrow("k.r", "f.l")
  c.arrow("f.r", "loss.t", bend="hv")
  c.arrow("v.r", "loss.b", bend="hv")
  c.arrow("loss.r", (6.3, 2.1), "$-\\eta\\,\\nabla_W$", shift=(0, 0.3))
  c.box("q", 0.6, 0.75, "$q$", "query")
  c.box("y", 8.25, 0.75, "$y = f(q;\\, W)$", "out", w=1.6)
  c.arrow("q.r", "y.l")
  c.arrow((7.9, 2.0), "y.t", bend="hv", kind="state")
  c.text(
    0.3,
    0.22,
    "each token is one gradient step; the trained model answers the query",
    ha="left",
    size=10,
  )
  return c


def softmax_attention():
  """All tokens, or a window of them, are kept."""
  c = Canvas(9.2, 3.5)
  cell = 0.24
  for y, text, seen in (
    (2.95, "full", range(16)),
    (2.25, "window of $W$ tokens", range(10, 16)),
    (1.55, "window with sinks", (0, 1, *range(12, 16))),
  ):
    c.text(0.3, y, text, ha="left", size=10.5)
    for j in range(16):
      c.grid(
        f"{text}{j}",
        2.6 + j * 0.27,
        y,
        1,
        1,
        "value" if j in seen else "op",
        cell=cell,
      )
  c.text(2.6, 3.3, "first token", size=10)
  c.text(6.65, 3.3, "current token", size=10)
  c.box("q", 0.7, 0.65, "$q$", "query")
  c.box("p", 3.7, 0.65, "$p_j = \\mathrm{softmax}_j(q\\cdot k_j)$", w=2.6)
  c.box("y", 7.3, 0.65, "$y = \\sum_j p_j v_j$", "out", w=1.7)
  c.chain("q.r p.l", "p.r y.l")
  c.arrow((3.7, 1.38), "p.t", kind="value")
  c.text(7.15, 2.25, "filled: kept and seen", ha="left", size=10)
  return c


DIAGRAMS = {
  "delta_rule": delta_rule,
  "state_space_duality": state_space_duality,
  "linear_attention": linear_attention,
  "infini_attention": infini_attention,
  "slot_attention": slot_attention,
  "rwkv7": rwkv7,
  "two_pass_delta": two_pass_delta,
  "ovq": ovq,
  "test_time_training": test_time_training,
  "softmax_attention": softmax_attention,
}
