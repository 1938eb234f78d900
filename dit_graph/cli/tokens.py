"""Turns prompts into a causal LM's tokens and answers into text; it knows the tokenizer alone."""

from typing import TYPE_CHECKING, Any

import torch

from dit_graph.cli.errors import UsageError, told

if TYPE_CHECKING:
    from dit_graph.cli.prefill import PrefillOptions


Inputs = dict[str, torch.Tensor]
"""A model is called with this: `input_ids` and `attention_mask`, both (1, tokens) int64."""


def read(options: "PrefillOptions", tokenizer: Any, most: int | None) -> list[Inputs]:
    """Make tokens of each prompt, for a model that takes `most` of them (None: any number).

    Raises:
        UsageError: there is no chat template for --chat, or a prompt is too long or too short.
    """
    if options.chat and not tokenizer.chat_template:
        raise UsageError(
            f"--chat: the tokenizer of {options.model_name} has no chat template; leave it out"
        )
    inputs = [_encode(tokenizer, prompt, options.chat) for prompt in options.prompts]
    for number, given in enumerate(inputs, 1):
        _check_length(number, given["input_ids"].shape[1], options.max_new_tokens, most)
    return inputs


def text(tokenizer: Any, answer: torch.Tensor) -> str:
    """Read the tokens of an `answer` (n,) as text, without the special ones."""
    read: str = tokenizer.decode(
        answer, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return read


def _encode(tokenizer: Any, prompt: str, chat: bool) -> Inputs:
    with told(f"reading {prompt!r}"):
        if chat:
            given = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                return_dict=True,
                return_tensors="pt",
            )
        else:
            given = tokenizer(prompt, return_tensors="pt")
    return {name: given[name] for name in ("input_ids", "attention_mask")}


def _check_length(number: int, tokens: int, new: int, most: int | None) -> None:
    if tokens == 0:
        raise UsageError(f"prompt {number} gives no tokens; say what to complete")
    if most is not None and tokens + new > most:
        raise UsageError(
            f"prompt {number} has {tokens} tokens, which with --max-new-tokens {new} is over the "
            f"{most} positions of the model"
        )
