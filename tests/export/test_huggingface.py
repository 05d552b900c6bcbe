"""Checkpoints of Llama and Qwen2; `data/make.py` made them and their logits."""

import itertools
import json
import pathlib
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as safetensors

from memcomp import errors
from memcomp.data import chat_template
from memcomp.evaluation import load
from memcomp.export import huggingface, read, write
from memcomp.layers import softmax_attention
from memcomp.models import abstract

DATA = pathlib.Path(__file__).parent / "data"
NAMES = ("llama", "llama_tied_sharded", "qwen2")


def logits_of(config, params, tokens):
  model = abstract.merge(abstract.model_of(config).graphdef, params)
  return jax.jit(model.__call__)(tokens)


@pytest.fixture
def copy(tmp_path):
  return shutil.copytree(DATA / "llama", tmp_path / "llama")


def change(folder, **fields):
  path = folder / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_library_s(name):
  folder = DATA / name
  config, params = huggingface.load_params(folder)
  found = logits_of(config, params, np.load(folder / "tokens.npy"))
  expected = np.load(folder / "logits.npy")
  assert expected.std() > 0.5
  np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


def test_arrays_of_integers_are_refused(copy):
  path = copy / "model.safetensors"
  arrays = safetensors.load_file(path)
  safetensors.save_file(
    {name: array.astype(np.int8) for name, array in arrays.items()}, path
  )
  with pytest.raises(errors.UserError, match="is of int8, as in quantized"):
    huggingface.load_params(copy)


def test_what_the_config_says(copy):
  config, _ = huggingface.load_params(copy)
  assert config.norm_eps == 1e-2
  assert not config.tied_embeddings
  mixer = config.mixers["attention"]
  assert isinstance(mixer, softmax_attention.SoftmaxAttentionConfig)
  assert (mixer.heads, mixer.kv_heads, mixer.key_dim) == (4, 2, 8)
  assert mixer.rotary_base == 500.0
  # As versions before 5 wrote it.
  change(copy, rope_parameters=None, rope_theta=700.0, rope_scaling=None)
  config, _ = huggingface.load_params(copy)
  assert config.mixers["attention"].rotary_base == 700.0


@pytest.mark.parametrize(
  ("fields", "named"),
  [
    ({"model_type": "mixtral"}, "model_type='mixtral'"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"attention_bias": True}, "attention_bias=True"),
    ({"mlp_bias": True}, "mlp_bias=True"),
    ({"use_sliding_window": True}, "use_sliding_window=True"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
    ({"quantization_config": {"bits": 4}}, "quantization_config="),
    (
      {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
      "rope_scaling={'rope_type': 'llama3'",
    ),
    (
      {"rope_parameters": None, "rope_scaling": {"type": "linear"}},
      "rope_scaling={'type': 'linear'}",
    ),
    # Beside the file's own rope_parameters, of which transformers takes none.
    (
      {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
      "rope_scaling={'rope_type': 'llama3'",
    ),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"head_dim": 7}, "rotary_dim=7 must be even"),
  ],
)
def test_a_feature_that_is_not_here_is_named(copy, fields, named):
  change(copy, **fields)
  with pytest.raises(errors.UserError) as error:
    huggingface.load_params(copy)
  assert named in str(error.value)


def test_arrays_too_few_too_many_and_rounded(copy):
  file = copy / "model.safetensors"
  arrays = safetensors.load_file(file)
  _, before = huggingface.load_params(copy)

  safetensors.save_file(
    {k: v.astype(ml_dtypes.bfloat16) for k, v in arrays.items()}, file
  )
  _, after = huggingface.load_params(copy)
  rounded = jax.tree.map(
    lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32),
    jax.tree.map(np.asarray, before),
  )
  jax.tree.map(np.testing.assert_array_equal, after, rounded)

  safetensors.save_file(
    arrays | {"model.layers.0.gate": arrays["lm_head.weight"]}, file
  )
  with pytest.raises(
    errors.UserError, match=r"has not: model\.layers\.0\.gate"
  ):
    huggingface.load_params(copy)
  del arrays["model.norm.weight"]
  safetensors.save_file(arrays, file)
  with pytest.raises(errors.UserError, match=r"no array model\.norm\.weight"):
    huggingface.load_params(copy)
  file.write_bytes(b"nothing")
  with pytest.raises(errors.UserError, match="cannot be read"):
    huggingface.load_params(copy)
  file.unlink()
  with pytest.raises(errors.UserError, match="neither"):
    huggingface.load_params(copy)


WRONG = [
  ("num_attention_heads", 0),
  ("num_attention_heads", -4),
  ("num_attention_heads", "4"),
  ("num_attention_heads", None),
  ("num_attention_heads", 1 << 80),
  ("num_key_value_heads", -1),
  ("num_key_value_heads", 3),
  ("num_hidden_layers", 0),
  ("num_hidden_layers", 1 << 30),
  ("num_hidden_layers", 1.5),
  ("hidden_size", 0),
  ("hidden_size", "x"),
  ("head_dim", -8),
  ("head_dim", 7),
  ("vocab_size", 0),
  ("vocab_size", [48]),
  ("intermediate_size", 1 << 40),
  ("rms_norm_eps", "1e-6"),
  ("rms_norm_eps", float("nan")),
  ("rope_parameters", [1]),
  ("rope_parameters", {"rope_theta": "x"}),
  ("rope_parameters", {"rope_theta": float("inf")}),
  ("layer_types", 5),
  ("max_position_embeddings", -1),
  ("tie_word_embeddings", "yes"),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_config_of_wrong_values(copy, field, value):
  change(copy, **{field: value})
  with pytest.raises(errors.UserError) as caught:
    huggingface.load_params(copy)
  message = str(caught.value)
  assert str(copy / "config.json") in message and "\n" not in message


def test_arrays_of_wrong_shapes(copy):
  file = copy / "model.safetensors"
  arrays = safetensors.load_file(file)
  shapes = itertools.cycle([(), (3, 5)])
  for name, shape in zip(arrays, shapes, strict=False):
    wrong = np.zeros(shape, np.float32)
    safetensors.save_file(arrays | {name: wrong}, file)
    with pytest.raises(errors.UserError) as caught:
      huggingface.load_params(copy)
    assert "\n" not in str(caught.value)


def give_tokenizer(folder, ids=48):
  import tokenizers

  vocab = {chr(65 + i): i for i in range(ids)}
  tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="A")).save(
    str(folder / "tokenizer.json")
  )


def test_the_tokenizer_of_another_model_is_refused(copy):
  give_tokenizer(copy, 49)
  with pytest.raises(
    errors.UserError, match="has 49 ids, more than the model's"
  ):
    load.open_checkpoint(copy)


@pytest.mark.parametrize("text", ['{"format": "memc', "[]", "\xff", "[" * 9999])
def test_settings_that_are_no_json_are_not_taken_for_absent(copy, text):
  give_tokenizer(copy)
  path = copy / "config.json"
  path.write_text(text, encoding="latin-1")
  with pytest.raises(errors.UserError) as caught:
    load.open_checkpoint(copy)
  message = str(caught.value)
  assert message.startswith(f"{path} is no") and "restore it" in message
  # That of a run is not needed, and other folders are none of ours.
  (copy / "model.safetensors").unlink()
  with pytest.raises(errors.UserError, match="no checkpoint in"):
    load.open_checkpoint(copy)


def test_it_is_asked_by_the_template_of_its_tokenizer(copy, tmp_path):
  give_tokenizer(copy)
  assert load.open_checkpoint(copy).template() is None
  source = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
  )
  config = {
    "chat_template": source,
    "bos_token": {"content": "<s>"},
    "eos_token": "</s>",
  }
  (copy / "tokenizer_config.json").write_text(json.dumps(config))
  write.export(copy, tmp_path / "out")
  for folder in (copy, tmp_path / "out"):
    template = load.open_checkpoint(folder).template()
    assert template is not None
    assert template.ask([], "A") == "<s>[user] A</s>[assistant] "
    assert template.stop == "</s>"
  # Other tasks do not need it, so what is wrong in it is told by chat alone.
  broken = config | {"chat_template": "{% if %}"}
  (copy / "tokenizer_config.json").write_text(json.dumps(broken))
  opened = load.open_checkpoint(copy)
  with pytest.raises(errors.UserError, match="is no Jinja template"):
    opened.template()


def test_a_template_in_a_file_of_its_own_is_enough(tmp_path):
  assert chat_template.spec_in(tmp_path) is None
  (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
  spec = chat_template.spec_in(tmp_path)
  assert spec is not None and spec["source"] == "{{ messages }}"
  (tmp_path / "chat_template.jinja").write_bytes(b"a\xff")
  with pytest.raises(errors.UserError, match=r"jinja is damaged, .*; rest"):
    chat_template.spec_in(tmp_path)


@pytest.mark.parametrize(("longest", "window"), [(64, 64), (131_072, 2048)])
def test_it_is_scored_at_its_own_length_and_trained_at_the_default(
  copy, longest, window
):
  give_tokenizer(copy)
  change(copy, max_position_embeddings=longest)
  opened = load.open_checkpoint(copy)
  assert opened.config.data.sequence_length == window
  assert opened.meta["config"]["data"]["sequence_length"] == window
  assert load.config_of(copy).data.sequence_length == 256


def test_a_checkpoint_with_its_tokenizer_is_opened_as_a_run(copy, tmp_path):
  with pytest.raises(errors.UserError, match=r"no tokenizer\.json"):
    load.open_checkpoint(copy)
  give_tokenizer(copy)
  opened = load.open_checkpoint(copy)
  assert opened.tokenizer.vocab_size == 48
  assert opened.config.name == "llama"
  # And exported as one of ours.
  write.export(copy, tmp_path / "out")
  found = read.load(tmp_path / "out")
  expected = np.load(copy / "logits.npy")
  tokens = np.load(copy / "tokens.npy")
  model = found.model
  logits = jax.jit(model.__call__)(tokens)
  np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)
