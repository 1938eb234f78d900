"""What a kind of workload brings to the one Runner, as data and small helpers."""

from dataclasses import replace
from typing import Any, cast

import torch

from dit_graph.config import GraphConfig
from dit_graph.errors import ConfigError
from dit_graph.modes.denoise import denoisers
from dit_graph.state.libraries import is_pipeline

Parts = dict[str, tuple[torch.nn.Module, GraphConfig]]


def parts(target: Any, config: GraphConfig) -> Parts:
    """The modules of a target that are graphed and how, by name.

    Raises:
        ConfigError: there are none, or the config asks for what the target has not.
    """
    if config.mode == "prefill":
        from dit_graph.modes.prefill.bodies import bodies  # transformers is slow to import

        return {name: (module, config) for name, module in bodies(target).items()}
    if config.syncs and config.remove_syncs != "auto" and not hasattr(target, "scheduler"):
        raise ConfigError(
            f"remove_syncs needs a pipeline with a scheduler, got {type(target).__name__}"
        )
    found = {name: (module, config) for name, module in denoisers(target).items()}
    return found | text_encoders(target, config) if config.text_encoders else found


def text_encoders(target: Any, config: GraphConfig) -> Parts:
    """A pipeline's text encoders: LLMs with padded tokens, others at exact shapes."""
    from dit_graph.modes.prefill.bodies import bodies

    if not is_pipeline(target):
        raise ConfigError(f"text_encoders=True needs a pipeline, got {type(target).__name__}")
    components: dict[str, Any] = cast(Any, target).components
    found: Parts = {}
    plain = replace(config, text_encoders=False, remove_syncs=False)
    for name, encoder in components.items():
        if not name.startswith("text_encoder") or not isinstance(encoder, torch.nn.Module):
            continue
        try:
            (body,) = bodies(encoder).values()
            found[name] = body, replace(plain, mode="prefill")
        except ConfigError:  # no LLM: pipelines pad its tokens themselves
            found[name] = encoder, plain
    return found
