"""The flags of models that see."""
from dataclasses import dataclass
from typing import ClassVar

from settings import Flags, not_default, values_of


@dataclass
class PictureArgs(Flags):
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
        """Yields a sentence for each rule that is broken (settings.Flags)."""
        if plan.shape and plan.shape.kind != "pictures":
            yield from (f"--{name} needs a model that sees pictures." for name in not_default(self))
        flags = values_of(plan.args)
        if self.train_vision and flags.get("lora_rank"):
            yield ("--train_vision trains all weights of the tower, and --lora_rank trains "
                   "adapters alone: give one of them.")
        if plan.shape and plan.shape.kind == "pictures" and flags.get("teacher_prompt"):
            yield ("--teacher_prompt is for models that read text alone, and --model sees "
                   "pictures.")
