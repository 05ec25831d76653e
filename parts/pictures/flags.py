"""The flags of models that see."""
from dataclasses import dataclass
from typing import ClassVar

from settings import Flags, not_default


@dataclass
class PictureArgs(Flags):
    """Vision models (docs/use/data_and_rewards.md)."""
    max_image_tokens: int = 0
    """Maximum tokens per picture: larger ones are scaled down. 0: the model's own limit."""
    min_image_tokens: int = 0
    """Minimum tokens per picture: smaller ones are scaled up. 0: the model's own limit."""
    train_vision: bool = False
    """Also train the vision tower and projector. Otherwise they are frozen."""
    fixed: ClassVar[tuple[str, ...]] = ("train_vision",)

    def rules(self, plan):
        """Yields a sentence for each broken rule (settings.Flags)."""
        if plan.shape and plan.shape.kind != "pictures":
            yield from (f"--{name} needs a model that sees pictures." for name in not_default(self))
        flags = vars(plan.args)
        if self.train_vision and flags.get("lora_rank"):
            yield ("--train_vision trains all weights of the tower, and --lora_rank trains "
                   "adapters alone: give one of them.")
        if plan.shape and plan.shape.kind == "pictures" and flags.get("teacher_prompt"):
            yield ("--teacher_prompt is for models that read text alone, and --model sees "
                   "pictures.")
