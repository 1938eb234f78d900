"""Prompt to concept: plain words, no model.

Owns how a prompt is read. It does not know tensors, weights or which concepts exist.
"""

import difflib
import re
from collections.abc import Iterator, Sequence

# Everyday words for concepts whose data-set name is a less common one.
ALIASES = {
    "beer": "beer-mug",
    "bike": "bicycle",
    "bunny": "rabbit-face",
    "burger": "hamburger",
    "car": "automobile",
    "cheese": "cheese-wedge",
    "chick": "baby-chick",
    "christmas": "christmas-tree",
    "donut": "doughnut",
    "aeroplane": "airplane",
    "fir": "evergreen-tree",
    "football": "soccer-ball",
    "gift": "wrapped-gift",
    "heart": "red-heart",
    "home": "house",
    "ice-cream": "soft-ice-cream",
    "kitten": "cat-face",
    "ladybird": "lady-beetle",
    "ladybug": "lady-beetle",
    "lightbulb": "light-bulb",
    "bee": "honeybee",
    "moon": "crescent-moon",
    "pine": "evergreen-tree",
    "plane": "airplane",
    "present": "wrapped-gift",
    "puppy": "dog-face",
    "pumpkin": "jack-o-lantern",
    "ship": "sailboat",
    "soccer": "soccer-ball",
    "train": "locomotive",
    "tree": "deciduous-tree",
}


class UnknownConcept(ValueError):
    """The prompt named nothing that the embedded model can draw."""


def _forms(words: Sequence[str]) -> Iterator[str]:
    """The hyphenated name, then its singular readings (`foxes`, `cherries`, `wolves`)."""
    stem, last = "-".join([*words[:-1], ""]), words[-1]
    yield stem + last
    for plural, singular in (("ies", "y"), ("ves", "f"), ("es", ""), ("s", "")):
        if last.endswith(plural) and len(last) > len(plural) + 1:
            yield stem + last[: -len(plural)] + singular


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


class ConceptIndex:
    """Finds the concept that a prompt means.

    Args:
        names: the known concepts, hyphenated and in lower case.

    A prompt matches by the longest run of its words that is a known name: exactly, in the
    singular or plural, by an everyday alias, without `-face`, or by the last words of a name
    (`cake` for `birthday-cake`). Among runs of one length the first in the prompt wins.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        known = set(self.names)
        self._by_name: dict[str, str] = {name: name for name in self.names}
        self._add((name, name) for name in self.names)
        self._add((alias, name) for alias, name in ALIASES.items() if name in known)
        self._add((name.removesuffix("-face"), name) for name in self.names)
        self._add(
            (name.split("-", skip)[skip], name)
            for name in self.names
            for skip in range(1, name.count("-") + 1)
        )

    def _add(self, pairs: Iterator[tuple[str, str]]) -> None:
        for spoken, name in pairs:
            for form in _forms(spoken.split("-")):
                self._by_name.setdefault(form, name)

    def find(self, prompt: str) -> str:
        """The concept that `prompt` means.

        Raises:
            UnknownConcept: nothing matched; the message lists the nearest known concepts.
        """
        words = _words(prompt)
        for length in range(len(words), 0, -1):
            for start in range(len(words) - length + 1):
                for form in _forms(words[start : start + length]):
                    if form in self._by_name:
                        return self._by_name[form]
        raise UnknownConcept(
            f"no known concept in {prompt!r}; nearest: {', '.join(self.nearest(prompt))} "
            f"({len(self.names)} known, see pipeline.concepts)"
        )

    def nearest(self, prompt: str, count: int = 3) -> list[str]:
        """Up to `count` known concepts spelt most like a word of `prompt`, best first."""
        words = _words(prompt)
        scores = {
            name: max(
                (
                    difflib.SequenceMatcher(None, word, spoken).ratio()
                    for word in [*words, "-".join(words)]
                    for spoken in (name, *name.split("-"))
                ),
                default=0.0,
            )
            for name in self.names
        }
        return sorted(self.names, key=lambda name: -scores[name])[:count]
