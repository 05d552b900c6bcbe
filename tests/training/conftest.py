import jax
import leaky
import pytest
import training_cases
from jax.experimental.compilation_cache import compilation_cache

from memcomp.models import decoder


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory):
  # Workers of pytest-xdist have folders of their own beside each other.
  folder = tmp_path_factory.getbasetemp().parent / "memcomp-programs"
  folder.mkdir(exist_ok=True)
  return str(folder)


@pytest.fixture(autouse=True)
def quick_compiles(cache_folder, monkeypatch):
  """Programs here run for milliseconds: compile them fast, and once."""
  settings = {
    "jax_disable_most_optimizations": True,
    "jax_compilation_cache_dir": cache_folder,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
  }
  before = {name: jax.config.values[name] for name in settings}
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", cache_folder)
  for name, value in settings.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


@pytest.fixture
def text(tmp_path):
  return training_cases.write_text(tmp_path / "text")


@pytest.fixture
def leaky_model(monkeypatch):
  """A decoder that compiles in a second, where the memory is beside the point."""
  monkeypatch.setattr(decoder, "Decoder", leaky.Decoder)
