"""What tests of adapters do with a network: compute, train a little, save as PEFT does."""

import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

import folders
from surefoot.methods import METHODS
from surefoot.model.section import ModelSection
from surefoot.optim import OPTIMIZERS

SMALL = {"oft": {"block_size": 16}}  # what methods need to fit tiny models
FITTING = {  # methods of each optimizer; some entries of a matrix do not go with all of them
    name: [m for m in METHODS if m != "badam_ratio" or made.is_entrywise]
    for name, made in OPTIMIZERS.items()
}
IDS = torch.arange(40).view(2, 20) % 60 + 3


def gpt2(folder):
    """A model whose weights are transposed, and some of them square."""
    known = folders.tokenizer()
    torch.manual_seed(1)
    sizes = {"vocab_size": len(known), "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    ends = {"eos_token_id": known.eos_token_id, "bos_token_id": known.eos_token_id}
    config = GPT2Config(**sizes, **ends, tie_word_embeddings=False)
    GPT2LMHeadModel(config).save_pretrained(folder)
    folders.save_tokenizer(known, folder)
    return folder


def method_of(name):
    """The method ``name`` for a tiny model."""
    return METHODS[name](**SMALL.get(name, {}))


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(IDS).logits


def trained(network, steps=3):
    """The network after some steps that change every trainable value."""
    optimizer = torch.optim.AdamW(network.named.values(), lr=1e-2)
    for _ in range(steps):
        network.module(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return network


def saved(network, folder):
    folder.mkdir()
    tensors = {name: t.contiguous() for name, t in network.weights.state_dict().items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    for name, content in network.weights.small_files(ModelSection(path="base"), None, ()).items():
        (folder / name).write_bytes(content)
    return folder
