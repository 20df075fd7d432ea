"""Makes the reference outputs in tiny_llama/ and tiny_llama_tied/ with PyTorch and transformers.

    python make_tiny_llama.py [output folder, by default the one this script is in]

An independent implementation (Hugging Face's LlamaForCausalLM, fp32, CPU, eager attention) is given
random weights and one small batch. What it computes is written down: logits, loss, the gradient of
every parameter, and ten AdamW steps on that same batch. README.md says what the files hold.
"""

import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

SETTINGS = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay_matrices": 0.1,
            "clip": 1.0, "steps": 10}
BATCH, LENGTH, IGNORED = 4, 32, -100

COMMON = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, initializer_range=0.08, rms_norm_eps=1e-5, pad_token_id=None,
    use_cache=False, attn_implementation="eager")


def make_model(seed, **config):
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**COMMON, **config)).float().eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():  # gains of one and biases of zero would hide a kernel that ignores them
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def make_batch(seed, vocab):
    generator = torch.Generator().manual_seed(seed + 2)
    tokens = torch.randint(0, vocab, (BATCH, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, :3] = IGNORED  # 6 of 128 targets, unequally spread over the sequences
    labels[0, 9] = IGNORED
    labels[1, -2:] = IGNORED
    return tokens[:, :-1].clone(), labels


def loss_of(model, inputs, labels):
    logits = model(input_ids=inputs).logits
    return logits, cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def train(model, inputs, labels):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": SETTINGS["weight_decay_matrices"]},
         {"params": others, "weight_decay": 0.0}],
        lr=SETTINGS["lr"], betas=SETTINGS["betas"], eps=SETTINGS["eps"])
    losses, norms = [], []
    for _ in range(SETTINGS["steps"]):
        optimizer.zero_grad()
        _, loss = loss_of(model, inputs, labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS["clip"])
        norms.append(norm.item())
        losses.append(loss.item())
        optimizer.step()
    return losses, norms


def write_weights(model, folder, shards):
    # named_parameters() lists a tied table once, under the embedding's name
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, weight_map = sorted(weights), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * len(names) // shards:(shard + 1) * len(names) // shards]
        content = {name: weights[name] for name in part}
        save_file(content, folder / file, metadata={"format": "pt"})
        weight_map |= {name: file for name in part}
    total = sum(w.numel() * w.element_size() for w in weights.values())
    write_json(folder / "model.safetensors.index.json",
               {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_config(model, folder, old_style):
    config = json.loads(model.config.to_json_string(use_diff=False))
    kept = ["architectures", "model_type", "attention_bias", "attention_dropout", "hidden_act",
            "hidden_size", "initializer_range", "intermediate_size", "max_position_embeddings",
            "mlp_bias", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
            "rms_norm_eps", "tie_word_embeddings", "vocab_size"]
    out = {key: config[key] for key in kept}
    out["architectures"] = ["LlamaForCausalLM"]
    rope = config["rope_parameters"]
    if old_style:  # as transformers 4 wrote it: no head_dim, theta at the top
        theta = rope["rope_theta"]
        out |= {"rope_theta": theta, "rope_scaling": None, "torch_dtype": "float32"}
    else:
        out |= {"head_dim": config["head_dim"], "rope_parameters": rope, "dtype": "float32"}
    write_json(folder / "config.json", out)


def write_json(path, content):
    path.write_text(json.dumps(content, indent=1) + "\n")


def make(folder, seed, shards, old_style, **config):
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(seed, **config)
    inputs, labels = make_batch(seed, config["vocab_size"])
    write_weights(model, folder, shards)
    write_config(model, folder, old_style)

    logits, loss = loss_of(model, inputs, labels)
    loss.backward()
    out = {"input_ids": inputs.int(), "labels": labels.int(), "logits": logits.detach(),
           "loss": loss.detach().reshape(1)}
    out |= {f"grad.{name}": p.grad.clone() for name, p in model.named_parameters()}

    reloaded = LlamaForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32).eval()
    again, _ = loss_of(reloaded, inputs, labels)
    assert torch.equal(again, logits), f"{folder} does not hold the model that was run"

    losses, norms = train(model, inputs, labels)
    out |= {"adamw.losses": torch.tensor(losses, dtype=torch.float64),
            "adamw.grad_norms": torch.tensor(norms, dtype=torch.float64)}
    out |= {f"adamw.final.{name}": p.detach().clone() for name, p in model.named_parameters()}
    save_file(out, folder / "reference.safetensors")
    valid = int((labels != IGNORED).sum())
    write_json(folder / "reference.json", SETTINGS | {
        "batch": {"sequences": BATCH, "length": LENGTH, "valid_targets": valid}, "seed": seed,
        "losses": losses, "grad_norms": norms,
        "torch": torch.__version__, "transformers": transformers.__version__})
    print(folder, f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else __file__).resolve()
    root = root if root.is_dir() else root.parent
    make(root / "tiny_llama", seed=1234, shards=1, old_style=False, vocab_size=64,
         intermediate_size=48, tie_word_embeddings=False,
         rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    make(root / "tiny_llama_tied", seed=4321, shards=2, old_style=True, vocab_size=48,
         intermediate_size=40, tie_word_embeddings=True, attention_bias=True, mlp_bias=True,
         rope_parameters={"rope_type": "default", "rope_theta": 5000.0})


if __name__ == "__main__":
    main()
