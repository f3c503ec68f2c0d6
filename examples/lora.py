"""Fine-tuning a local Hugging Face checkpoint with LoRA (`pip install peft`) over two ranks.

    python examples/lora.py make lora/base                    # a tiny Llama: nothing is downloaded
    torchrun --nproc-per-node 2 examples/lora.py lora/base    # or the folder of a checkpoint of yours

The base weights stay frozen, only the adapters are trained. They are saved in `lora/adapter` in peft's own format:
`PeftModel.from_pretrained(base, "lora/adapter")` loads them.
"""

import sys
from pathlib import Path

import torch
import transformers as hf
from peft import LoraConfig, PeftModel, get_peft_model

import vpipe

LENGTH = 32


def build_base(folder: Path) -> None:
    """A checkpoint as `save_pretrained` writes it, with random weights."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    settings = hf.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, bos_token_id=None)
    hf.LlamaForCausalLM(settings).save_pretrained(folder)


def load_model(folder: Path) -> PeftModel:
    base = hf.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, use_cache=False)
    torch.manual_seed(1)  # of the adapters
    return get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def minibatches(count: int, seed: int):
    """Bytes of Python's own source; the beginning of each sample, of varying length, is not trained on."""
    text = torch.tensor(list(Path(torch.__file__).read_bytes()))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(text) - LENGTH, (8, 1), generator=generator)
        ids = text[starts + torch.arange(LENGTH)]
        prompt = torch.randint(1, LENGTH // 2, (8, 1), generator=generator)
        yield {"input_ids": ids, "labels": ids.masked_fill(torch.arange(LENGTH) < prompt, -100)}


def main(folder: Path, checkpoint: Path, updates: int = 20, world=None) -> None:
    """`world` is given where ranks are threads, as in the tests; else they are torchrun's processes."""
    model = load_model(checkpoint)
    pipe = vpipe.Pipeline(
        model,
        next(minibatches(1, seed=0)),
        minibatches=4,
        loss_weight="tokens",  # minibatches have different numbers of targets
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        world=world,
    )
    with pipe:
        for update, loss in pipe.train(minibatches(4 * updates, seed=1)):
            if pipe.rank == 0 and update % 5 == 0:
                print(f"update {update}, loss {loss:.3f}")
        weights = pipe.full_state_dict()
        if pipe.rank == 0:
            model.load_state_dict(weights)
            model.save_pretrained(folder / "adapter")
            print(f"adapters are in {folder / 'adapter'}")


if __name__ == "__main__":
    if sys.argv[1] == "make":
        build_base(Path(sys.argv[2]))
    else:
        main(Path("lora"), Path(sys.argv[1]))
