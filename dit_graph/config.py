"""The frozen choices of one `enable`. Reads nothing from the environment."""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from dit_graph.errors import ConfigError

Backend = Literal["breakable", "full", "debug", "eager"]
DeviceName = Literal["auto", "cuda", "recorder"]
OnNewShape = Literal["capture", "eager", "error"]
OnFailure = Literal["eager", "raise"]


@dataclass(frozen=True)
class GraphConfig:
    """What `enable` was asked for.

    Args:
        backend: `"breakable"` (segments with eager breaks, the default), `"full"` (one graph or
            nothing), `"debug"` (the whole call is one eager break: same buffers and replay path, no
            graph) or `"eager"` (never record).
        device: `"auto"` takes CUDA where the module is on one and runs eagerly elsewhere;
            `"recorder"` records and replays on the CPU, bit for bit, for tests and for looking.
        on_new_shape: what a signature does that `warmup` did not see: `"capture"` records it on its
            second call, `"eager"` and `"error"` do what they say.
        on_failure: `"eager"` answers a failed capture or replay eagerly and counts it,
            `"raise"` lets the error out.
        breaks: `fnmatch` patterns of what stays eager: submodule paths, for example `("*.attn",)`,
            or torch functions by name, for example `("scaled_dot_product_attention",)`.
        max_variants: recordings that one signature may hold, each for other host values; the least
            recently used one makes room.
        max_graphs: recordings that stay alive in all; the least recently used half retires.

    Raises:
        ConfigError: a value is not one of these.
    """

    backend: Backend = "breakable"
    device: DeviceName = "auto"
    on_new_shape: OnNewShape = "capture"
    on_failure: OnFailure = "eager"
    breaks: tuple[str, ...] = ()
    max_variants: int = 8
    max_graphs: int = 64

    def __post_init__(self) -> None:
        if isinstance(self.breaks, str) or not all(isinstance(p, str) for p in self.breaks):
            raise ConfigError(f"breaks must be a sequence of patterns, got {self.breaks!r}")
        object.__setattr__(self, "breaks", tuple(self.breaks))
        for name, hint in get_type_hints(type(self)).items():
            known, value = get_args(hint), getattr(self, name)
            if hint is int and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
            if all(isinstance(k, str) for k in known) and known and value not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}; got {value!r}")

    @classmethod
    def of(cls, config: "GraphConfig | None", options: dict[str, Any]) -> "GraphConfig":
        """`config` or a new one from `options`; both at once, or an unknown name, is an error."""
        if config is not None and not isinstance(config, GraphConfig):
            raise ConfigError(f"config must be a GraphConfig, got {type(config).__name__}")
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(options) - set(known)):
            raise ConfigError(f"unknown option {', '.join(unknown)}; known: {', '.join(known)}")
        if config is not None and options:
            raise ConfigError(f"give a config or options, not both (got {', '.join(options)})")
        return config if config is not None else cls(**options)
