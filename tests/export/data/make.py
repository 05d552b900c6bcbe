"""Makes the checkpoints here, and what their own library computes with them.

  pip install torch==2.13.0 transformers==5.23.0
  python tests/export/data/make.py

Small models with random weights, each as `save_pretrained` writes it, with
`tokens.npy` `[rows, time]` and the `logits.npy` `[rows, time, vocab]` that
transformers gives for them in float32.
"""

import pathlib

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
SIZES = {
  "vocab_size": 48,
  "hidden_size": 16,
  "intermediate_size": 24,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 64,
}
MODELS = {
  # Grouped heads wider than hidden_size / heads.
  "llama": (
    transformers.LlamaConfig(
      **SIZES,
      head_dim=8,
      rms_norm_eps=1e-2,
      rope_parameters={"rope_type": "default", "rope_theta": 500.0},
      tie_word_embeddings=False,
    ),
    transformers.LlamaForCausalLM,
    "1GB",
  ),
  "llama_tied_sharded": (
    transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    transformers.LlamaForCausalLM,
    "8KB",
  ),
  "qwen2": (
    transformers.Qwen2Config(**SIZES, tie_word_embeddings=False),
    transformers.Qwen2ForCausalLM,
    "1GB",
  ),
}


def main() -> None:
  for name, (config, model_type, shard) in MODELS.items():
    torch.manual_seed(0)
    model = model_type(config).eval()
    with torch.no_grad():
      for parameter in model.parameters():
        # Norms and biases too, or leaving them out would go unseen.
        parameter.add_(0.3 * torch.randn_like(parameter))
    tokens = torch.randint(0, config.vocab_size, (2, 20))
    with torch.no_grad():
      logits = model(tokens).logits
    model.save_pretrained(HERE / name, max_shard_size=shard)
    (HERE / name / "generation_config.json").unlink()
    np.save(HERE / name / "tokens.npy", tokens.numpy().astype(np.int32))
    np.save(HERE / name / "logits.npy", logits.numpy())
    print(name, float(logits.std()))


if __name__ == "__main__":
  main()
