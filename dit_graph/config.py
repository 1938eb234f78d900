"""The frozen choices of one `enable`. Reads nothing from the environment."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from dit_graph.call.buckets import Buckets
from dit_graph.errors import ConfigError

Mode = Literal["denoise", "prefill"]
Backend = Literal["breakable", "full", "debug", "eager"]
DeviceName = Literal["auto", "cuda", "recorder"]
OnNewShape = Literal["capture", "eager", "error"]
OnFailure = Literal["eager", "raise"]
Verify = Literal["first", "always", "off"]
WhenFaster = Literal["measure", "always"]
Sync = Literal["timesteps", "step"]
Regions = Literal["auto", "off", "blocks"]


@dataclass(frozen=True)
class GraphConfig:
    """What `enable` was asked for.

    Args:
        mode: `"denoise"` records the repeated forward of a pipeline's denoisers or of a module;
            `"prefill"` that of a causal LM's transformer body, tokens padded to buckets.
        buckets: of prefill: the token counts that are recorded, rising; by default 4 to 32 by 4, 48
            to 256 by 16 and so on, up to `max_tokens`.
        max_tokens: the largest default bucket.
        text_encoders: record a pipeline's text encoders too: LLMs with tokens padded to buckets,
            where results differ from eager's in the last bits if a token count is no bucket, others
            at exact shapes.
        backend: `"breakable"` (segments with eager breaks, the default), `"full"` (one graph or
            nothing), `"debug"` (the whole call is one eager break: same buffers and replay path, no
            graph) or `"eager"` (never record).
        device: `"auto"` takes CUDA where the module is on one and runs eagerly elsewhere;
            `"recorder"` records and replays on the CPU, bit for bit, for tests and for looking.
        on_new_shape: what a signature does that `warmup` did not see: `"capture"` records it on its
            second call, `"eager"` and `"error"` do what they say.
        on_failure: `"eager"` answers a failed capture or replay eagerly and counts it,
            `"raise"` lets the error out.
        strict: raise `NotReplayed` at the first call that is neither replayed, captured nor the
            first of a signature that will be captured. A call that the gate runs eagerly to time it
            is allowed; its verdict that eager is as fast is not (`gate="always"` has none). A call
            that is part of another recording is allowed too. `DIT_GRAPH_DISABLE` wins over it.
        verify: `"first"` compares a recording when it is made, and its first replay, with an eager
            call on the same inputs, bit for bit, `"always"` every replay; the answer is eager's.
            Where they differ the signature is eager from then on. A recording that writes into what
            outlives the call, or has a marked break with side effects, is not compared.
        gate: `"measure"` times replays against eager calls with the device's clock and makes a
            signature eager whose replay does not win by `min_gain`; `"always"` replays regardless,
            as does `verify="always"`. Signatures with several variants are not timed.
        min_gain: the share of an eager call's time that a replay must save.
        memory_budget: device memory that the recordings of one `enable` may hold: bytes, a share of
            the device such as `"10%"`, or None for no limit. The least recently used recordings
            retire, together with those that share their memory.
        extra_key: `extra_key(module, arguments)` gives one more value that keeps calls apart, for
            what a forward reads that is neither an argument nor the module's state, such as a
            global; `arguments` are the call's by parameter name. Called at every call.
        breaks: `fnmatch` patterns of what stays eager: submodule paths, for example `("*.attn",)`,
            or torch functions by name, for example `("scaled_dot_product_attention",)`.
        regions: `"auto"` records a module's blocks one by one where its forward cannot be recorded
            as a whole (step caches, hooks on blocks, Python state), and goes back to one recording
            where it can again; `"blocks"` never tries the whole; `"off"` leaves such calls eager.
            Blocks are the elements of its outermost lists of one class.
        remove_syncs: what makes a loop wait for the device is taken out, from outside, until
            `disable`. `"auto"`: in diffusers' own pipelines with a scheduler whose pictures were
            shown to stay the same (31 are), and the report names what it is off for. True: in every
            pipeline, or only some of `("timesteps", "step")`. `"timesteps"`: the scheduler's
            timesteps lie on the device from `set_timesteps` on, so that none is uploaded in a step.
            `"step"`: its `step` and `scale_model_input` get their timestep on the host. Pictures
            stay the same; a step callback gets its timestep on the device.
        max_variants: recordings that one signature may hold, each for other host values; the least
            recently used one makes room.
        max_graphs: recordings that stay alive in all; the least recently used half retires.

    Raises:
        ConfigError: a value is not one of these.
    """

    mode: Mode = "denoise"
    buckets: tuple[int, ...] | None = None
    max_tokens: int = 2048
    text_encoders: bool = False
    backend: Backend = "breakable"
    device: DeviceName = "auto"
    on_new_shape: OnNewShape = "capture"
    on_failure: OnFailure = "eager"
    breaks: tuple[str, ...] = ()
    strict: bool = False
    verify: Verify = "first"
    gate: WhenFaster = "measure"
    min_gain: float = 0.01
    memory_budget: int | str | None = "10%"
    extra_key: Callable[[Any, dict[str, Any]], Any] | None = None
    regions: Regions = "auto"
    remove_syncs: bool | Literal["auto"] | tuple[Sync, ...] = "auto"
    max_variants: int = 8
    max_graphs: int = 64

    def __post_init__(self) -> None:
        listed = isinstance(self.breaks, Iterable) and not isinstance(self.breaks, (str, Mapping))
        if not (listed and all(isinstance(p, str) for p in self.breaks)):
            raise ConfigError(f"breaks must be a sequence of patterns, got {self.breaks!r}")
        object.__setattr__(self, "breaks", tuple(self.breaks))
        if self.backend == "full" and self.breaks:
            raise ConfigError(f'backend="full" is one graph and has no breaks, got {self.breaks!r}')
        if self.buckets is not None and self.mode != "prefill":
            raise ConfigError(
                'buckets belong to mode="prefill"; a size is never padded in denoising'
            )
        if self.buckets is not None:
            object.__setattr__(self, "buckets", Buckets(self.buckets).sizes)
        for name, hint in get_type_hints(type(self)).items():
            allowed, value = get_args(hint), getattr(self, name)
            if hint is int and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
            if allowed and all(isinstance(a, str) for a in allowed) and value not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
            if hint is bool and type(value) is not bool:
                raise ConfigError(f"{name} must be True or False, got {value!r}")
        self._set_syncs()
        if self.regions == "blocks" and self.mode == "prefill":
            raise ConfigError('regions="blocks" belongs to mode="denoise"')
        gain = self.min_gain
        if type(gain) not in (int, float) or not 0 <= gain < 1:
            raise ConfigError(f"min_gain must be a share from 0 to below 1, got {gain!r}")
        if self.extra_key is not None and not callable(self.extra_key):
            raise ConfigError(f"extra_key must be a function or None, got {self.extra_key!r}")
        self.budget_on(1)

    def _set_syncs(self) -> None:
        """`remove_syncs` as names: of all that are known for True, of none for False."""
        given: Any = self.remove_syncs
        if given == "auto" and self.mode == "denoise":
            return
        if given == "auto":
            given = False
        if type(given) is bool:
            given = get_args(Sync) if given else ()
        if not isinstance(given, (tuple, list)) or not all(s in get_args(Sync) for s in given):
            names = ", ".join(map(repr, ("auto", *get_args(Sync))))
            raise ConfigError(f"remove_syncs must be True, False or of {names}; got {given!r}")
        if given and self.mode == "prefill":
            raise ConfigError("remove_syncs belongs to a pipeline's denoising loop")
        object.__setattr__(self, "remove_syncs", tuple(given))

    def against(self, other: "GraphConfig") -> str:
        """The fields in which this config differs, for example `backend='full', not 'debug'`."""
        names = [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]
        return "; ".join(f"{n}={self._given(n)!r}, not {other._given(n)!r}" for n in names)

    def _given(self, name: str) -> Any:
        """A field as people give it."""
        value = getattr(self, name)
        if name == "remove_syncs" and value in ((), get_args(Sync)):
            return bool(value)
        return value

    @property
    def syncs(self) -> tuple[Sync, ...]:
        """The host syncs to remove, by name."""
        assert not isinstance(self.remove_syncs, bool)
        return get_args(Sync) if self.remove_syncs == "auto" else self.remove_syncs

    def budget_on(self, total: int) -> int | None:
        """`memory_budget` in bytes on a device of `total` bytes; None for no limit."""
        budget = self.memory_budget
        if budget is None or (type(budget) is int and budget > 0):
            return budget
        if isinstance(budget, str) and budget.endswith("%"):
            try:
                share = float(budget[:-1])
            except ValueError:
                share = 0.0
            if 0 < share <= 100:
                return int(total * share / 100)
        raise ConfigError(
            f'memory_budget must be bytes, a share such as "10%", or None; got {budget!r}'
        )

    @classmethod
    def of(cls, config: "GraphConfig | None", options: dict[str, Any]) -> "GraphConfig":
        """`config` or a new one from `options`; both at once, or an unknown name, is an error."""
        if config is not None and not isinstance(config, GraphConfig):
            raise ConfigError(f"config must be a GraphConfig, got {type(config).__name__}")
        names = [f.name for f in fields(cls)]
        if unknown := sorted(set(options) - set(names)):
            raise ConfigError(f"unknown option {', '.join(unknown)}; known: {', '.join(names)}")
        if config is not None and options:
            raise ConfigError(f"give a config or options, not both (got {', '.join(options)})")
        return config if config is not None else cls(**options)
