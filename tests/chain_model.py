"""A Llama folder whose next token is a function of the last one alone.

After "a" it says "b", the end of text, and then "cdcd..." for ever.
"""

import json
import pathlib

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LETTERS = (*"abcdefgh", "\u0120", "\u010a")  # with a space and a line's end
END = len(LETTERS)
_WIDTH = 32


def make(
  folder: pathlib.Path,
  *,
  special: str = "<|endoftext|>",
  vocab_size: int = END + 1,
  **config: object,
) -> pathlib.Path:
  """Writes the folder; `config` sets fields of its config.json.

  Args:
    folder: to make.
    special: name of the token `END`.
    vocab_size: ids of the model; those beyond the tokenizer's are never made.
    **config: fields of config.json.
  """
  folder.mkdir(parents=True)
  tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(LETTERS)}, []))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens([special])
  tokenizer.save(str(folder / "tokenizer.json"))
  d = _WIDTH
  head = np.zeros((vocab_size, d), np.float32)
  for before, after in {0: 1, 1: END, END: 2, 2: 3, 3: 2}.items():
    head[after, before] = 10
  layer = {
    **{f"self_attn.{name}_proj": (d, d) for name in "qkvo"},
    "mlp.gate_proj": (2 * d, d),
    "mlp.up_proj": (2 * d, d),
    "mlp.down_proj": (d, 2 * d),
  }
  norms = "layers.0.input_layernorm", "layers.0.post_attention_layernorm"
  arrays = {
    "lm_head.weight": head,
    "model.embed_tokens.weight": 8 * np.eye(vocab_size, d, dtype=np.float32),
    **{
      f"model.layers.0.{name}.weight": np.zeros(shape, np.float32)
      for name, shape in layer.items()
    },
    **{
      f"model.{name}.weight": np.ones(d, np.float32)
      for name in ("norm", *norms)
    },
  }
  save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
  fields = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": d,
    "intermediate_size": 2 * d,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": vocab_size,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": END,
  }
  (folder / "config.json").write_text(json.dumps(fields | config))
  return folder
