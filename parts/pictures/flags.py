"""The flags of models that see."""
from dataclasses import dataclass
from typing import ClassVar

from errors import not_default


@dataclass
class PictureArgs:
    """Models that see (docs/use/data_and_rewards.md)."""
    max_image_tokens: int = 0
    """Most tokens of one picture: larger ones are scaled down. 0: the model's own limit."""
    min_image_tokens: int = 0
    """Least tokens of one picture: smaller ones are scaled up. 0: the model's own."""
    train_vision: bool = False
    """Train a model's vision tower and projector too. Else they stay as they are."""
    fixed: ClassVar[tuple[str, ...]] = ("train_vision",)

    @property
    def limits(self) -> tuple[int, int]:
        """Least and most tokens of a picture."""
        return self.min_image_tokens, self.max_image_tokens

    def rules(self, plan):
        """See plan.problems."""
        if plan.shape and plan.shape.kind != "pictures":
            yield from (f"--{name} needs a model that sees pictures." for name in not_default(self))
