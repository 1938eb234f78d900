"""Decides which causal LM answers, and loads it.

What can be said from a model's folder and config is said before its weights are loaded.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dit_graph.cli.errors import UsageError, loading, one_line
from dit_graph.cli.model import is_hub_id
from dit_graph.embedded import smollm2
from dit_graph.errors import ConfigError
from dit_graph.modes.prefill.bodies import bodies

if TYPE_CHECKING:
    from dit_graph.cli.prefill import PrefillOptions

_TOKENIZERS = ("*token*", "vocab*", "*.model")
_HEADS = ("CausalLM", "LMHead", "ConditionalGeneration")


def check(options: "PrefillOptions") -> int | None:
    """Check all about the model that can be checked before it is loaded.

    Returns:
        How many tokens it takes, or None where its config does not say.

    Raises:
        UsageError: there is no such model, it is no causal LM, or prefill cannot pad it.
    """
    if options.model is None:
        try:
            smollm2.gguf_file()
        except FileNotFoundError as error:
            raise UsageError(one_line(error)) from error
        return smollm2.POSITIONS
    where = _where(options.model)
    with loading(f"cannot load the config of {options.model}"):
        config = AutoConfig.from_pretrained(where, trust_remote_code=False)
    _check_kind(config, options.model)
    if options.graph:
        _check_body(config, options.model)
    most: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return most


def _where(model: str) -> str:
    """Give `from_pretrained` what it takes for `--model`, a folder or an id on the hub."""
    path = Path(model).expanduser()
    if path.is_dir():
        _check_folder(path, model)
        return str(path)
    if path.exists() or not is_hub_id(model):
        raise UsageError(
            f"--model {model}: no such folder; give the folder of a saved transformers causal LM, "
            "or a hub id OWNER/NAME"
        )
    return model


def _check_folder(path: Path, model: str) -> None:
    if not (path / "config.json").is_file():
        raise UsageError(f"--model {model}: has no config.json, so it is no saved causal LM")
    if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise UsageError(f"--model {model}: has no weights (*.safetensors or *.bin)")
    if not any(found for name in _TOKENIZERS for found in path.glob(name)):
        raise UsageError(f"--model {model}: has no tokenizer; save it into the same folder")


def _check_kind(config: Any, model: str) -> None:
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UsageError(f"--model {model}: a {config.model_type} model is no causal LM")
    saved = config.architectures or []
    if saved and not any(head in name for name in saved for head in _HEADS):
        raise UsageError(f"--model {model}: {saved[0]} is no causal LM")


def _check_body(config: Any, model: str) -> None:
    """Build its modules without their weights, which says whether prefill can pad it."""
    with loading(f"cannot build {model}"), torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    try:
        bodies(empty)
    except ConfigError as error:
        raise UsageError(
            f"--model {model}: {one_line(error)}; --no-graph runs it without graphs"
        ) from error


def tokenizer(options: "PrefillOptions") -> Any:
    """Load the model's tokenizer. Raises UsageError where it cannot be loaded."""
    with loading(f"cannot load the tokenizer of {options.model_name}"):
        if options.model is None:
            return smollm2.tokenizer()
        return AutoTokenizer.from_pretrained(_where(options.model), trust_remote_code=False)


def load(options: "PrefillOptions") -> Any:
    """Load the model to its device; its `generate` is greedy, whatever its files say.

    Raises:
        UsageError: it cannot be loaded.
    """
    with loading(f"cannot load {options.model_name}"):
        if options.model is None:
            model = smollm2.load(options.dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(
                _where(options.model), dtype=options.dtype, trust_remote_code=False
            )
    model.generation_config = _greedy(model.generation_config, options.max_new_tokens)
    if options.device == "cuda":
        with loading(f"cannot move {options.model_name} to the GPU"):
            model.to("cuda")
    return model


def _greedy(saved: Any, new: int) -> GenerationConfig:
    """Decode greedily, but stop where the saved config would."""
    ends = saved.eos_token_id
    first = ends[0] if isinstance(ends, list) else ends
    pad = saved.pad_token_id if saved.pad_token_id is not None else first
    return GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=new,
        bos_token_id=saved.bos_token_id,
        eos_token_id=ends,
        pad_token_id=0 if pad is None else pad,  # One prompt needs no padding.
    )
