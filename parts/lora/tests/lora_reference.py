"""Adapters as the paper writes them, for tests/reference.py."""
import reference
from reference_settings import Setting
from settings import values_of
from test_reference import start_of

LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
          "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


class Model(reference.Model):
    """The model's own weights stay; of the layers that --lora_targets names A and B learn."""

    def parameters(self, lm) -> dict:
        found, flags = {}, values_of(self.args)
        for name in [f"layers.{layer}.{linear}" for layer in range(2) for linear in LINEAR]:
            if flags["lora_targets"] != ("all-linear",) and (
                    name.rpartition(".")[2] not in flags["lora_targets"]):
                continue
            layer = self.lm.base_model.get_submodule(name)
            out, width = layer.weight.shape
            rank = flags["lora_rank"]
            A, B = (start_of(f"{name}.{which}", shape).requires_grad_() for which, shape in (
                ("lora_A", (rank, width)), ("lora_B", (out, rank))))
            found |= {f"{name}.lora_A": A, f"{name}.lora_B": B}
            self.add_adapter(layer, A, B)
        return found

    def add_adapter(self, layer, A, B):
        """y = W x + alpha / rank · B A x        LoRA: https://arxiv.org/abs/2106.09685"""
        flags = values_of(self.args)
        alpha, rank = flags["lora_alpha"], flags["lora_rank"]
        scale = 2.0 if alpha is None else alpha / rank
        layer.register_forward_hook(lambda layer, inputs, y: y + scale * (inputs[0] @ A.T) @ B.T)


class Adapted(Setting):
    """Adapters learn; the reference model is the policy without them."""
    before = "policy"

    def model(self, lm, args, head=None, adapted=True):
        kind = Model if adapted and args.parts.lora.lora_rank else reference.Model
        return kind(lm, args, head)
