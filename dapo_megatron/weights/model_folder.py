"""From `model:` in the configuration to an HF folder on disk: installed packages and GGUF files included."""

from __future__ import annotations

import importlib.util
import logging
import shutil
import tempfile
from pathlib import Path

from dapo_megatron.config.schema import ModelConfig

logger = logging.getLogger(__name__)

PACKAGE_PREFIX = "package:"


def resolve_model_folder(settings: ModelConfig) -> Path:
    """The HF folder of the policy; a GGUF file is converted on first use and kept under `cache_dir`.

    Raises:
        ValueError: the folder, the package or the GGUF file is missing.
    """
    folder = _locate(settings)
    if settings.gguf_file is None:
        return folder
    source = folder / settings.gguf_file
    if not source.is_file():
        found = ", ".join(sorted(path.name for path in folder.glob("*.gguf"))) or "no GGUF file"
        raise ValueError(f"model.gguf_file {settings.gguf_file!r} is not in {folder}, which holds {found}")
    target = Path(settings.cache_dir) / source.stem
    if not target.is_dir():
        _convert_gguf(source, target)
    return target


def _locate(settings: ModelConfig) -> Path:
    if settings.path.startswith(PACKAGE_PREFIX):
        name = settings.path.removeprefix(PACKAGE_PREFIX)
        # find_spec of a top-level package does not import it.
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            how = settings.made_by or f"pip install {name.replace('_', '-')}"
            raise ValueError(f"model.path {settings.path!r}: the Python package is not installed; run `{how}`")
        return Path(next(iter(spec.submodule_search_locations)))
    folder = Path(settings.path)
    if not folder.is_dir():
        hint = f"; `{settings.made_by}` makes it" if settings.made_by else ""
        raise ValueError(f"model.path {settings.path!r} is not a folder{hint}")
    return folder


def _convert_gguf(source: Path, target: Path) -> None:
    """Dequantise a GGUF file to an HF folder in bfloat16, through transformers' own GGUF reader."""
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{source.name} needs two packages; run `pip install gguf accelerate`") from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    logger.info("converting %s to %s (once)", source, target)
    loaded = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.bfloat16)
    # save_pretrained refuses a model that came from a quantised file, so its weights move into a fresh one.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(loaded)(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as staging:
        written = Path(staging) / target.name
        model.save_pretrained(written)
        AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(written)
        shutil.move(written, target)
