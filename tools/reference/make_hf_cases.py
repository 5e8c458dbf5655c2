"""Makes tests/fixtures/hf: tiny models of Hugging Face transformers with what they compute.

    python3 tools/reference/make_hf_cases.py OUT_DIR        (needs torch and transformers 5; never needed to build or run)

Each case holds config.json and model.safetensors as transformers saves them, input_ids.npy [B,S], logits.safetensors,
grads.safetensors (the gradient of loss by every parameter, under the names of transformers' memory), train_ids.npy
[20,B,S] and expected.json: loss, its parts, and the losses and gradient norms of twenty AdamW steps over train_ids.
"""

import json
import pathlib
import sys

import numpy
import torch
import transformers
from safetensors.torch import save_file

SHARED = dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64,
              bos_token_id=None, eos_token_id=None)
MOE = dict(num_experts_per_tok=2, output_router_logits=True)

CASES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM,
              dict(intermediate_size=72, num_key_value_heads=2, rope_theta=5e5, rms_norm_eps=1e-6)),
    "llama_tied": (transformers.LlamaConfig, transformers.LlamaForCausalLM,
                   dict(intermediate_size=72, tie_word_embeddings=True, pad_token_id=1)),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM,
                dict(intermediate_size=56, num_key_value_heads=1, head_dim=16, sliding_window=None)),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM,
              dict(intermediate_size=48, num_key_value_heads=2, head_dim=12)),
    "olmo": (transformers.OlmoConfig, transformers.OlmoForCausalLM, dict(intermediate_size=64, pad_token_id=1)),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM,
              dict(intermediate_size=64, num_key_value_heads=2, pad_token_id=1)),
    "olmoe": (transformers.OlmoeConfig, transformers.OlmoeForCausalLM,
              dict(MOE, intermediate_size=24, num_experts=8, pad_token_id=1, router_aux_loss_coef=0.01)),
    "olmoe_renormalised": (transformers.OlmoeConfig, transformers.OlmoeForCausalLM,
                           dict(MOE, intermediate_size=16, num_experts=16, num_experts_per_tok=4, norm_topk_prob=True,
                                num_key_value_heads=2, pad_token_id=1, router_aux_loss_coef=0.02)),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM,
                  dict(MOE, intermediate_size=48, moe_intermediate_size=20, num_experts=8, num_experts_per_tok=3,
                       norm_topk_prob=True, num_key_value_heads=2, head_dim=16)),
    "qwen3_moe_first_dense": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM,
                              dict(MOE, intermediate_size=48, moe_intermediate_size=20, num_experts=8,
                                   norm_topk_prob=True, mlp_only_layers=[0], head_dim=8)),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM,
                dict(MOE, intermediate_size=24, num_local_experts=4, num_key_value_heads=2, sliding_window=None,
                     router_aux_loss_coef=0.02)),
}


def losses(model, ids):
    output = model(input_ids=ids, labels=ids)
    cross_entropy = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return output.loss, cross_entropy, getattr(output, "aux_loss", None), output.logits


def make(name, folder):
    config_class, model_class, settings = CASES[name]
    torch.manual_seed(sum(name.encode()))
    model = model_class(config_class(**{**SHARED, **settings})).float().train()
    with torch.no_grad():  # norm weights of one would hide a missing multiplication
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)

    ids = torch.randint(0, SHARED["vocab_size"], (2, 24))
    train_ids = torch.randint(0, SHARED["vocab_size"], (20, 2, 24))
    loss, cross_entropy, aux, logits = losses(model, ids)
    loss.backward()
    save_file({"logits": logits.detach().contiguous()}, folder / "logits.safetensors")
    save_file({key: value.grad.contiguous() for key, value in model.named_parameters()}, folder / "grads.safetensors")
    numpy.save(folder / "input_ids.npy", ids.numpy())
    numpy.save(folder / "train_ids.npy", train_ids.numpy())
    expected = dict(loss=loss.item(), ce=cross_entropy.item(), aux=None if aux is None else aux.item(),
                    transformers=transformers.__version__, torch=torch.__version__, train_losses=[], grad_norms=[])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for batch in train_ids:
        optimizer.zero_grad()
        loss = losses(model, batch)[0]
        loss.backward()
        expected["train_losses"].append(loss.item())
        expected["grad_norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in CASES:
        make(case, pathlib.Path(sys.argv[1]) / case)
        print(case, flush=True)
