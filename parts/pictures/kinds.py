"""kinds.py: the model types that see, and how each makes ids and pixels of a picture."""
from errors import SettingsError, as_sentence
from parts.pictures import idefics3, qwen2_vl

NAMES = {"idefics3": "Idefics3", "qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL",
         "qwen3_vl": "Qwen3VL"}  # of transformers
ARCHITECTURES = {kind: idefics3 if kind == "idefics3" else qwen2_vl for kind in NAMES}


def find_eyes(args, config, folder: str, reference: str | None = None):
    """Of --model, in its folder. reference: that of another model, which gets the same pixels."""
    eyes = load_eyes(args.model, folder, config, args.min_image_tokens, args.max_image_tokens)
    if reference:
        from transformers import AutoConfig
        config, theirs = AutoConfig.from_pretrained(reference), None
        if config.model_type in ARCHITECTURES:
            theirs = load_eyes(args.teacher, reference, config, flag="teacher")
        if theirs is None or theirs.kind != eyes.kind:
            raise SettingsError(f"--teacher {args.teacher} must see as --model {args.model} does: "
                                "with an equal processor for pictures and an equal image token.")
    return eyes


def load_eyes(name: str, folder: str, config, *limits: int, flag: str = "model"):
    """Those of a model's family. SettingsError: its files have no processor."""
    with as_sentence(f"--{flag} {name} has no processor for pictures that transformers can load"):
        return ARCHITECTURES[config.model_type].Eyes(folder, config, *limits)


def check_template(name: str, inputs):
    """SettingsError: the processor has another chat template than the tokenizer. vLLM takes the
    processor's, and for a chat with tools the tokenizer's."""
    from transformers import ProcessorMixin
    with as_sentence(f"--model {name} has no processor that transformers can load"):
        theirs = ProcessorMixin.get_processor_dict(inputs.source)[0].get("chat_template")
    if theirs is not None and theirs != inputs.tokenizer.chat_template:
        raise SettingsError(f"--model {name}: its processor's chat template, which vLLM takes for "
                            "pictures, differs from its tokenizer's. Would work: one "
                            "chat_template.jinja, and no chat_template.json.")
