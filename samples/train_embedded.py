"""Train the embedded model: one run, boxed in time, from an image file to a pipeline folder.

The learning rate follows elapsed time over budget, so a run of any length ends at its lowest rate
and is complete in itself. `--init` goes on from the weights of an earlier run.

    PYTHONPATH=. python samples/train_embedded.py --data .data/emoji64.npz --output .build/embedded

writes the pipeline (float16) into `--output`, and `train_log.json`, `contact.png`, `sizes.png` and
`guidance.png` into `--sheets` (its parent folder unless given).

Why it is made this way:
* the model predicts the clean picture while the loss is that of the velocity: at 48 values a patch
  a small network need not carry the noise through its layers, and white stays white;
* each drawing has its own condition (concept + style + drawing), so drawings do not blend, which
  is what frayed the edges of a model that knew only the concept;
* nothing is mirrored or shifted, and a canvas larger than a drawing has it in its centre, where all
  positions count from: one memory of a drawing serves every size.
"""

import argparse
import json
import math
import platform
import random
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import torch._dynamo
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from PIL import Image
from torch import nn

from dit_graph.embedded import ConceptEncoder, EmojiPipeline
from dit_graph.embedded.patches import (
    DRAWING,
    IN_CHANNELS,
    OUT_CHANNELS,
    caption_ids,
    pack,
    patch_ids,
    position_channels,
)

# (height, width), the share of batches. Larger canvases get smaller batches of as many patches.
SIZES = (((64, 64), 0.78), ((64, 96), 0.09), ((96, 64), 0.09), ((128, 128), 0.04))
WIDTH, HEADS, LAYERS = 256, 8, 7
NO_CONDITION, NO_STYLE = 0.08, 0.04
"""Shares of rows trained without any condition (for guidance) and without a style."""
MIN_SIGMA = 0.1
"""Below it the velocity loss stops weighing small errors of the clean picture up."""
RESERVE_S = 60.0
"""What saving and drawing the sheets may take before `--deadline`."""
SHOWN = (
    "fox",
    "cat-face",
    "rocket",
    "pizza",
    "penguin",
    "octopus",
    "sunflower",
    "hamburger",
    "birthday-cake",
    "robot",
    "ghost",
    "panda",
    "rainbow",
    "strawberry",
    "airplane",
    "owl",
    "mushroom",
    "butterfly",
    "doughnut",
    "house",
    "guitar",
    "bicycle",
    "umbrella",
    "tiger-face",
)


@dataclass
class Drawings:
    """The training set: N drawings and what they are of."""

    pixels: torch.Tensor  # (N, 3, 64, 64) uint8
    concept_ids: torch.Tensor  # (N,) int64
    style_ids: torch.Tensor  # (N,) int64
    concepts: list[str]
    styles: list[str]

    def drawn_in(self) -> list[list[int]]:
        """For each concept the numbers of its styles."""
        pairs = sorted(zip(self.concept_ids.tolist(), self.style_ids.tolist(), strict=True))
        return [[s for c, s in pairs if c == number] for number in range(len(self.concepts))]


def read_lines(path: Path) -> list[str]:
    """The lines of a list file without comments and blank lines."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def load_drawings(data: Path, concepts: Path, device: torch.device) -> Drawings:
    """The drawings of the listed concepts, less those in `excluded.txt` beside the list."""
    arrays = np.load(data)
    names, styles = arrays["names"].tolist(), arrays["styles"].tolist()
    wanted = read_lines(concepts)
    if missing := sorted(set(wanted) - set(names)):
        raise SystemExit(f"{data} has no {', '.join(missing)}")
    excluded_file = concepts.with_name("excluded.txt")
    excluded = set(read_lines(excluded_file)) if excluded_file.is_file() else set()
    keep = [
        row
        for row, (name, style) in enumerate(zip(names, styles, strict=True))
        if name in set(wanted) and f"{name} {style}" not in excluded
    ]
    all_styles = sorted({styles[row] for row in keep})
    return Drawings(
        torch.from_numpy(arrays["images"][keep]).permute(0, 3, 1, 2).contiguous().to(device),
        torch.tensor([wanted.index(names[row]) for row in keep], device=device),
        torch.tensor([all_styles.index(styles[row]) for row in keep], device=device),
        wanted,
        all_styles,
    )


class Model(nn.Module):
    """Transformer and concept encoder, trained as one."""

    def __init__(self, transformer: FluxTransformer2DModel, encoder: ConceptEncoder) -> None:
        super().__init__()
        self.transformer = transformer
        self.encoder = encoder

    @classmethod
    def fresh(cls, drawings: Drawings) -> "Model":
        """Start values: every block begins as the identity and the output as grey."""
        encoder = ConceptEncoder(
            concepts=drawings.concepts, styles=drawings.styles, drawings=drawings.drawn_in()
        )
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=IN_CHANNELS,
            out_channels=OUT_CHANNELS,
            num_layers=0,
            num_single_layers=LAYERS,
            attention_head_dim=WIDTH // HEADS,
            num_attention_heads=HEADS,
            joint_attention_dim=encoder.config.token_dim,
            pooled_projection_dim=encoder.config.pooled_dim,
            axes_dims_rope=(4, 14, 14),
        )
        for table in (encoder.concept, encoder.style, encoder.drawing):
            nn.init.normal_(table.weight, std=0.5)
        blocks = transformer.single_transformer_blocks
        for layer in [b.norm.linear for b in blocks] + [
            transformer.norm_out.linear,
            transformer.proj_out,
        ]:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        return cls(transformer, encoder)

    @classmethod
    def load(cls, folder: Path, drawings: Drawings) -> "Model":
        """The weights of an earlier run on the same list of concepts."""
        pipeline = EmojiPipeline.from_pretrained(folder, dtype=torch.float32)
        config = pipeline.concept_encoder.config
        known, now = [config.concepts, config.styles], [drawings.concepts, drawings.styles]
        if [list(k) for k in known] != now:
            raise SystemExit(f"{folder} was trained on other concepts or styles")
        return cls(pipeline.transformer, pipeline.concept_encoder)

    def save(self, folder: Path) -> None:
        """Write the pipeline in float16; the modules are copies and training could go on."""
        copies = []
        for module in (self.transformer, self.encoder):
            config = {k: v for k, v in module.config.items() if k != "_name_or_path"}
            copy = type(module).from_config(config)
            copy.load_state_dict(module.state_dict())
            copies.append(copy.half().eval())
        scheduler = FlowMatchEulerDiscreteScheduler()
        EmojiPipeline(copies[0], scheduler, copies[1]).save_pretrained(folder)


class Trainer:
    """Owns the optimizer, the averaged weights and one step."""

    def __init__(self, model: Model, drawings: Drawings, args: argparse.Namespace) -> None:
        self.model, self.drawings, self.args = model, drawings, args
        self.device = drawings.pixels.device
        self.parameters = list(model.parameters())
        self.average = [p.detach().clone() for p in self.parameters]
        matrices = [p for p in model.transformer.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters if all(p is not m for m in matrices)]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}],
            lr=args.lr,
            betas=(0.9, 0.98),
            fused=self.device.type == "cuda",
        )
        self.places = {size: self._place(*size) for size, _ in SIZES}
        self.caption_places = caption_ids(model.encoder.config.num_tokens).to(self.device)
        self.steps = 0
        if args.precision == "bf16":
            self._keep_edges_float32()

    def _place(self, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = patch_ids(height, width).to(self.device)
        return ids, position_channels(ids)

    def _keep_edges_float32(self) -> None:
        # bfloat16 only inside the blocks: the timestep, the residual stream and the output would
        # lose digits that a clean picture needs, and these layers cost next to nothing.
        t = self.model.transformer
        for edge in (t.x_embedder, t.context_embedder, t.time_text_embed, t.norm_out, t.proj_out):
            edge.forward = torch.autocast(self.device.type, enabled=False)(edge.forward)

    def batch(self, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pictures (B, 3, height, width) in -1..1 with concept and style numbers (B,)."""
        d = self.drawings
        count = max(1, self.args.batch * DRAWING * DRAWING // (height * width))
        rows = torch.randint(len(d.pixels), (count,), device=self.device)
        margin_y, margin_x = (height - DRAWING) // 2, (width - DRAWING) // 2
        pixels = d.pixels[rows].float() / 127.5 - 1
        canvas = nn.functional.pad(pixels, (margin_x, margin_x, margin_y, margin_y), value=1.0)
        chance = torch.rand(count, device=self.device)
        no_concept, no_style = chance < NO_CONDITION, chance < NO_CONDITION + NO_STYLE
        encoder = self.model.encoder
        concepts = d.concept_ids[rows].masked_fill(no_concept, encoder.null_concept)
        return canvas, concepts, d.style_ids[rows].masked_fill(no_style, encoder.null_style)

    def loss(self, height: int, width: int) -> torch.Tensor:
        """The velocity loss of one batch, 0-dim float32."""
        canvas, concepts, styles = self.batch(height, width)
        clean, count = pack(canvas), len(canvas)
        normal = torch.sigmoid(torch.randn(count, device=self.device))
        uniform = torch.rand(count, device=self.device)
        sigma = torch.where(torch.rand(count, device=self.device) < 0.15, uniform, normal)
        level = sigma[:, None, None]
        noisy = (1 - level) * clean + level * torch.randn_like(clean)
        ids, positions = self.places[height, width]
        with torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.args.precision == "bf16"
        ):
            tokens, pooled = self.model.encoder(concepts, styles)
            (predicted,) = self.model.transformer(
                hidden_states=torch.cat([noisy, positions.expand(count, -1, -1)], dim=2),
                encoder_hidden_states=tokens,
                pooled_projections=pooled,
                timestep=sigma,
                img_ids=ids,
                txt_ids=self.caption_places,
                return_dict=False,
            )
        return (((predicted.float() - clean) / level.clamp(min=MIN_SIGMA)) ** 2).mean()

    def step(self, done: float, size: tuple[int, int]) -> torch.Tensor:
        """One update at the share `done` of the budget; the detached loss."""
        fall = 0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2
        rate = self.args.lr * min(1.0, done / 0.02) * fall
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.loss(*size)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.steps += 1
        keep = min(0.999, (1 + self.steps) / (10 + self.steps))
        with torch.no_grad():
            torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 1 - keep)
        return loss.detach()

    def use_average(self) -> None:
        """Put the averaged weights in place."""
        with torch.no_grad():
            for parameter, average in zip(self.parameters, self.average, strict=True):
                parameter.copy_(average)


def warm_up(trainer: Trainer, compiled: bool) -> bool:
    """Run every size once, compiled if that works; whether it did. No weight changes."""
    blocks = trainer.model.transformer.single_transformer_blocks
    if compiled:
        torch._dynamo.config.recompile_limit = 64
        for block in blocks:
            block.compile(dynamic=False)
    try:
        for size, _ in SIZES:
            began = time.monotonic()
            trainer.loss(*size).backward()
            trainer.optimizer.zero_grad(set_to_none=True)
            print(f"warm-up {size[1]}x{size[0]}: {time.monotonic() - began:.1f} s", flush=True)
    except Exception as error:
        if not compiled:
            raise
        print(f"torch.compile failed, going on in eager: {str(error)[:500]}", flush=True)
        for block in blocks:
            block._compiled_call_impl = None
        torch._dynamo.reset()
        return warm_up(trainer, compiled=False)
    return compiled


def train(trainer: Trainer, budget_s: float, max_steps: int) -> float:
    """Train for `budget_s` seconds or `max_steps`; the mean loss of the last tenth or so."""
    chooser = random.Random(trainer.args.seed)
    sizes, shares = [s for s, _ in SIZES], [share for _, share in SIZES]
    start, mean = time.monotonic(), math.nan
    losses: list[torch.Tensor] = []
    while (elapsed := time.monotonic() - start) < budget_s and trainer.steps < max_steps:
        done = max(elapsed / budget_s, trainer.steps / max_steps)
        losses.append(trainer.step(done, chooser.choices(sizes, shares)[0]))
        if trainer.steps % trainer.args.log_every == 0:
            mean, losses = torch.stack(losses).mean().item(), []
            print(f"step {trainer.steps} loss {mean:.4f} at {elapsed:.0f} s", flush=True)
        elif trainer.steps % 50 == 0 and trainer.device.type == "cuda":
            torch.cuda.synchronize()  # the host runs ahead, and the clock is the host's
    return torch.stack(losses).mean().item() if math.isnan(mean) else mean


def sheet(rows: Sequence[Sequence[Image.Image]], gap: int = 2) -> Image.Image:
    """Rows of pictures on grey."""
    heights = [max(p.height for p in row) + gap for row in rows]
    width = max(sum(p.width + gap for p in row) for row in rows)
    out = Image.new("RGB", (width, sum(heights)), "grey")
    for number, row in enumerate(rows):
        left = 0
        for picture in row:
            out.paste(picture, (left, sum(heights[:number])))
            left += picture.width + gap
    return out


def draw_sheets(pipeline: EmojiPipeline, folder: Path) -> None:
    """`contact.png`: concepts by seeds; `sizes.png`; `guidance.png`: scales from 1 to 3."""
    shown = [name for name in SHOWN if name in pipeline.concepts] or list(pipeline.concepts[:24])

    def draw(names: Sequence[str], seed: int = 0, **options: Any) -> list[Image.Image]:
        seeds = [torch.Generator().manual_seed(100 * seed + n) for n in range(len(names))]
        images: list[Image.Image] = pipeline(list(names), generator=seeds, **options).images
        return images

    sheet([draw(shown, seed) for seed in range(3)]).save(folder / "contact.png")
    sheet([draw(shown[:10], height=h, width=w) for (h, w), _ in SIZES]).save(folder / "sizes.png")
    scales = (1.0, 1.25, 1.5, 2.0, 3.0)
    sheet([draw(shown, guidance_scale=s) for s in scales]).save(folder / "guidance.png")


def recall(pipeline: EmojiPipeline, drawings: Drawings) -> dict[str, Any]:
    """How near each drawing comes back when it is asked for: mean absolute error in 0..255."""
    errors: list[tuple[float, str]] = []
    for number, style in enumerate(drawings.styles):
        for rows in (drawings.style_ids == number).nonzero()[:, 0].split(128):
            names = [drawings.concepts[c] for c in drawings.concept_ids[rows].tolist()]
            seeds = [torch.Generator().manual_seed(n) for n in range(len(names))]
            drawn = pipeline(names, style=style, generator=seeds, output_type="pt").images
            off = (drawn * 255 - drawings.pixels[rows]).abs().mean(dim=(1, 2, 3)).tolist()
            errors += [(round(e, 2), f"{n} {style}") for e, n in zip(off, names, strict=True)]
    errors.sort()
    return {
        "drawings": len(errors),
        "median_error": errors[len(errors) // 2][0],
        "worst": [f"{name}: {error}" for error, name in errors[:-13:-1]],
    }


def pack_folder(folder: Path, target: Path) -> None:
    """Every file of the pipeline folder in one zip."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(f for f in folder.rglob("*") if f.is_file()):
            archive.write(file, file.relative_to(folder).as_posix())


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the embedded model.")
    parser.add_argument("--data", type=Path, required=True, help="the image file, .npz")
    parser.add_argument("--concepts", type=Path, default=Path(__file__).with_name("concepts.txt"))
    parser.add_argument("--output", type=Path, required=True, help="folder for the pipeline")
    parser.add_argument("--sheets", type=Path, help="folder for log and sheets")
    parser.add_argument("--pack", type=Path, help="also write the pipeline into this zip")
    parser.add_argument("--init", type=Path, help="pipeline folder to start from")
    parser.add_argument("--minutes", type=float, default=9.0, help="training time after warm-up")
    parser.add_argument("--deadline", type=float, help="minutes after which all must be written")
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--batch", type=int, default=128, help="64x64 drawings a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--log-every", type=int, default=500)
    return parser.parse_args(argv)


def environment(device: torch.device) -> dict[str, str]:
    """What the run ran on."""
    cuda = device.type == "cuda"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "device": torch.cuda.get_device_name(device) if cuda else platform.machine(),
    }


def set_up(args: argparse.Namespace) -> tuple[Trainer, bool]:
    """A trainer that is warmed up, and whether it is compiled."""
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    drawings = load_drawings(args.data, args.concepts, device)
    model = Model.load(args.init, drawings) if args.init else Model.fresh(drawings)
    trainer = Trainer(model.to(device).train(), drawings, args)
    print(
        f"{len(drawings.concepts)} concepts, {len(drawings.pixels)} drawings, "
        f"{sum(p.numel() for p in trainer.parameters):,} parameters",
        flush=True,
    )
    return trainer, warm_up(
        trainer, args.compile == "on" or (args.compile == "auto" and device.type == "cuda")
    )


def write_log(folder: Path, log: dict[str, Any]) -> None:
    """`train_log.json` in `folder`."""
    (folder / "train_log.json").write_text(json.dumps(log, indent=2) + "\n")


def finish(trainer: Trainer, sheets: Path, log: dict[str, Any]) -> dict[str, Any]:
    """Save, then load what was saved and draw with it; `log` with what came of it."""
    args = trainer.args
    trainer.use_average()
    trainer.model.save(args.output)
    if args.pack:
        pack_folder(args.output, args.pack)
    write_log(sheets, log)  # already now, in case the time runs out on the sheets
    pipeline = EmojiPipeline.from_pretrained(args.output, dtype=torch.float32)
    pipeline.to(trainer.device).set_progress_bar_config(disable=True)
    draw_sheets(pipeline, sheets)
    return log | {"recall": recall(pipeline, trainer.drawings)}


def main(argv: Sequence[str] | None = None) -> None:
    """Train, save, draw, log."""
    args, began = parse(argv), time.monotonic()
    sheets = args.sheets or args.output.parent
    for folder in (sheets, args.output):
        folder.mkdir(parents=True, exist_ok=True)
    trainer, compiled = set_up(args)
    warm_up_s = time.monotonic() - began
    budget_s = args.minutes * 60
    if args.deadline:
        budget_s = min(budget_s, args.deadline * 60 - warm_up_s - RESERVE_S)
    final_loss = train(trainer, budget_s, args.max_steps)
    log: dict[str, Any] = {
        "steps": trainer.steps,
        "warm_up_seconds": round(warm_up_s, 1),
        "train_seconds": round(time.monotonic() - began - warm_up_s, 1),
        "final_loss": round(final_loss, 5),
        "parameters": sum(p.numel() for p in trainer.parameters),
        "compiled": compiled,
        "environment": environment(trainer.device),
        "arguments": {name: str(value) for name, value in vars(args).items()},
    }
    log = finish(trainer, sheets, log)
    log["total_seconds"] = round(time.monotonic() - began, 1)
    write_log(sheets, log)
    print(json.dumps(log, indent=2))


if __name__ == "__main__":
    main()
